"""What stands to the right of the tokens in multilinear attention, and the core as its own multilinear SVD's.

Source and legend as in :mod:`kernel_attention.functional.multilinear`.
"""

from __future__ import annotations

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.kernels.statistics import exactly
from kernel_attention.kernels.tensors import leading_eigenvectors, mode_gram, mode_product, unfold


def multilinear_factors(
    weights: Sequence[Tensor], core: Tensor, compatibility: Tensor | None = None
) -> list[Tensor]:
    """What stands to the right of Phi_n in eq. 2-23, C_(n) (W_D (x) .. without W_n .. (x) W_1) S_(n)^T: (h,
    M_n, R_n) each.

    No sequence enters, so this is done once per forward, whatever the number of tokens. In float32 or better.
    """
    with torch.autocast(core.device.type, enabled=False):
        exact = [exactly(weight) for weight in weights]
        contract = (
            _dense_factor if compatibility is not None and compatibility.dim() > 2 else _superdiagonal_factor
        )
        compatibility = None if compatibility is None else exactly(compatibility)
        return [contract(exact, exactly(core), compatibility, n) for n in range(len(exact))]


def alike(tensors: Sequence[Tensor]) -> bool:
    """Whether they have one shape."""
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def letters(order: int) -> tuple[str, str]:
    """Names for the rank and the feature index of every mode in an einsum; h is taken by the heads."""
    return string.ascii_lowercase[8 : 8 + order], string.ascii_uppercase[:order]


def _superdiagonal_factor(
    weights: Sequence[Tensor], core: Tensor, diagonal: Tensor | None, keep: int
) -> Tensor:
    """sum over j, k, .. of c_a W_2[a, j] W_3[a, k] .. S[i, j, k, ..]: rows of the other W, multiplied out."""
    others = [weight for n, weight in enumerate(weights) if n != keep]
    rows = others[0] if diagonal is None else others[0] * diagonal[..., None]
    for weight in others[1:]:
        rows = (rows[..., :, None] * weight[..., None, :]).flatten(-2)  # (h, p, R_j R_k ..)
    return rows @ unfold(core, keep, len(weights)).mT


def _dense_factor(weights: Sequence[Tensor], core: Tensor, tensor: Tensor | None, keep: int) -> Tensor:
    """The same for a full compatibility tensor: S x_m W_m for every other mode m, then C over their
    features.
    """
    assert tensor is not None
    ranks, features = letters(len(weights))
    state = core
    for m, weight in enumerate(weights):
        if m != keep:
            state = mode_product(state, weight, m, len(weights))
    met = features.replace(features[keep], ranks[keep])
    return torch.einsum(f"h{features},h{met}->h{features[keep]}{ranks[keep]}", tensor, state)


def mlsvd_core(core: Tensor) -> Tensor:
    """The core of the multilinear SVD of S itself (eq. 3-15): (h, R_1..R_D), all-orthogonal and ordered.

    Every S_(n) S_(n)^T of the result is diagonal and falls along the diagonal. Signs are deterministic and
    gradients finite where singular values repeat; see
    :func:`kernel_attention.kernels.tensors.leading_eigenvectors`.
    """
    order = core.dim() - 1
    with torch.autocast(core.device.type, enabled=False):
        exact = exactly(core)
        bases = [leading_eigenvectors(mode_gram(exact, n, order), exact.size(1 + n)) for n in range(order)]
        for n, basis in enumerate(bases):
            exact = mode_product(exact, basis.mT, n, order)
        return exact
