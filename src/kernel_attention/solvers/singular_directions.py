"""The result of an asymmetric kernel SVD by any method, and its closed form from explicit features.

Source: Chen, Tao, Tonin, Suykens, "Primal-Attention: Self-attention through Asymmetric Kernel SVD in Primal
Representation", NeurIPS 2023.

Legend: n and m points, p features, s directions.
"""

from __future__ import annotations

from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import require_range
from kernel_attention.tensors.multilinear.unfoldings import deterministic_signs


class SingularDirections(NamedTuple):
    """K H_r = H_e Sigma and K^T H_e = H_r Sigma, the s leading directions.

    ``left`` is H_e (n, s), ``right`` H_r (m, s), ``values`` the diagonal of Sigma (s,), from the largest. The
    entry of largest size in each column of H_e is positive.

    ``e`` (n, s) and ``r`` (m, s) are the scores: K H_r and K^T H_e in the dual, Phi_x W_e and Phi_z W_r in
    the primal; with ``center`` (and H_e, H_r centred) their means, ``e_mean`` and ``r_mean`` (s,), are taken
    off, which are zeros otherwise. ``w_e`` and ``w_r`` (p, s) are None in the dual.

    ``objective`` is J with Lambda = Sigma^{-1}, 0 at a solution (lemma 4.2); directions whose singular value
    is rounding error do not enter. ``num_iter`` counts passes over the matrix, or epochs.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    e: Tensor
    r: Tensor
    objective: Tensor
    num_iter: int
    w_e: Tensor | None
    w_r: Tensor | None
    e_mean: Tensor
    r_mean: Tensor


def column_signs(left: Tensor) -> Tensor:
    """The signs (s,) that make the entry of largest size in every column of (n, s) positive."""
    return torch.where((deterministic_signs(left) * left).sum(dim=0) < 0, -1.0, 1.0).to(left)


def directions_objective(e: Tensor, r: Tensor, values: Tensor, trace: Tensor, size: float = 0.0) -> Tensor:
    """J = 1/2 sum_i e_i^T Lambda e_i + 1/2 sum_j r_j^T Lambda r_j - Tr(W_e^T W_r), Lambda = Sigma^{-1}.

    ``trace`` (s,) is the diagonal of W_e^T W_r. Directions whose singular value is rounding error, of sigma_1
    or of ``size`` where that is more, are left out.
    """
    floor = values[0].clamp_min(size) * max(e.size(0), r.size(0)) * torch.finfo(values.dtype).eps
    # J has the size of sigma, and so have the squares of e / sqrt(sigma); those of e may overflow.
    root = torch.where(values > floor, values.rsqrt(), 0.0)
    energy = (root * e).square().sum(dim=0) + (root * r).square().sum(dim=0)
    return (0.5 * energy - torch.where(values > floor, trace, 0.0)).sum()


def check_components(n_components: int, shape: tuple[int, ...]) -> None:
    """InputError where there cannot be this many directions."""
    if isinstance(n_components, bool) or not isinstance(n_components, Integral) or n_components < 1:
        raise InputError(f"n_components={n_components!r} must be a whole number from 1")
    if n_components > min(shape):
        raise InputError(f"n_components={n_components} must be at most {min(shape)}, the smaller side of K")


def check_iteration(n_oversamples: int, tol: float | None, most: int, name: str = "max_iter") -> None:
    """InputError for settings of an iteration that are not accepted."""
    if isinstance(n_oversamples, bool) or not isinstance(n_oversamples, Integral) or n_oversamples < 0:
        raise InputError(f"n_oversamples={n_oversamples!r} must be a whole number from 0")
    if tol is not None and not tol >= 0:
        raise InputError(f"tol={tol!r} must be a number from 0, or None")
    if isinstance(most, bool) or not isinstance(most, Integral) or most < 1:
        raise InputError(f"{name}={most!r} must be a whole number from 1")


class ScoreWeights(NamedTuple):
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


def sketched_weights(x_sketch: Tensor, z_sketch: Tensor, rank: int) -> ScoreWeights:
    """The weights of two sketches S_x (l, p) and S_z (l', p) in the place of all features.

    A sketch of fewer than ``rank`` rows has fewer directions than that; the missing ones are zeros.
    """
    left, values, right = closed_form(x_sketch, z_sketch, rank)
    missing = (0, max(rank - values.numel(), 0))
    values, w_e, w_r = (pad(part, missing) for part in (values, z_sketch.mT @ right, x_sketch.mT @ left))
    return ScoreWeights(values, w_e, w_r, 1, float("nan"))
