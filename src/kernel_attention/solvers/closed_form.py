"""The singular value decomposition of Phi_x Phi_z^T from its factors.

Legend: n and m points, p features, s directions.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.solvers.finite import require_range


class PrimalWeights(NamedTuple):
    """``values`` (s,), ``w_e`` and ``w_r`` (p, s): e(x) = W_e^T phi(x), r(z) = W_r^T phi(z).

    ``residual`` is the largest ||K^T h_e - sigma h_r|| / sigma.
    """

    values: Tensor
    w_e: Tensor
    w_r: Tensor
    num_epochs: int
    residual: float


def closed_form(phi_x: Tensor, phi_z: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Left vectors (n, s), values (s,) and right vectors (m, s) of Phi_x Phi_z^T, without forming it.

    Phi = Q R on both sides leaves the SVD of R_x R_z^T, (p, p). O((n + m) p^2). Unlike Gram matrices, the
    factors keep all digits of small singular values.
    """
    (q_x, r_x), (q_z, r_z) = torch.linalg.qr(phi_x), torch.linalg.qr(phi_z)
    small = r_x @ r_z.mT
    require_range("X", "the features' products with those of Z", small)
    u, values, vt = torch.linalg.svd(small, full_matrices=False)
    return q_x @ u[:, :rank], values[:rank], q_z @ vt[:rank].mT


def sketched_weights(x_sketch: Tensor, z_sketch: Tensor, rank: int) -> PrimalWeights:
    """The weights of two sketches S_x (l, p) and S_z (l', p) in the place of all features.

    A sketch of fewer than ``rank`` rows has fewer directions than that; the missing ones are zeros.
    """
    left, values, right = closed_form(x_sketch, z_sketch, rank)
    missing = (0, max(rank - values.numel(), 0))
    values, w_e, w_r = (pad(part, missing) for part in (values, z_sketch.mT @ right, x_sketch.mT @ left))
    return PrimalWeights(values, w_e, w_r, 1, float("nan"))
