"""The factors of multilinear attention without tokens, and the core of a core's own multilinear SVD.

Source and legend as in ``kernel_attention.mechanisms.multilinear.functional``.
"""

import string
from collections.abc import Sequence

import torch
from torch import Tensor

from kernel_attention.tensors.multilinear.unfoldings import leading_eigenvectors, mode_gram, mode_product
from kernel_attention.tensors.statistics import exactly, without_autocast


def multilinear_factors(
    weights: Sequence[Tensor], core: Tensor, compatibility: Tensor | None = None
) -> list[Tensor]:
    """The factors to the right of Phi_n in eq. 2-23, (h, M_n, R_n) each, in float32 or better.

    They are C_(n) (W_D (x) .. without W_n .. (x) W_1) S_(n)^T. They do not depend on the sequence, so they
    are computed once per forward.
    """
    with without_autocast(core):
        exact = [exactly(weight) for weight in weights]
        if compatibility is not None and compatibility.dim() > 2:
            return _dense_factors(exact, exactly(core), exactly(compatibility))
        factors = _superdiagonal_factors(exact, exactly(core))
        if compatibility is None:
            return factors
        return [exactly(compatibility)[..., None] * factor for factor in factors]


def alike(tensors: Sequence[Tensor]) -> bool:
    """True where all tensors have the same shape."""
    return all(tensor.shape == tensors[0].shape for tensor in tensors)


def letters(order: int) -> tuple[str, str]:
    """Names for the rank and the feature index of every mode in an einsum; h names the heads."""
    return string.ascii_lowercase[8 : 8 + order], string.ascii_uppercase[:order]


def _superdiagonal_factors(weights: Sequence[Tensor], core: Tensor) -> list[Tensor]:
    """Row a of factor n: the core contracted with row a of every other W_m.

    The modes after n are contracted first, for all n at once, by one product each; then the modes before n.
    """
    matrix = core.flatten(1, -2)  # (h, R_1 .. R_(D-1), R_D)
    after = [weights[-1] @ matrix.mT]  # (h, p, R_1 .. R_n): modes n + 1 .. D are contracted
    for weight in reversed(weights[1:-1]):
        after.insert(0, (_last_apart(after[0], weight) @ weight[..., None]).squeeze(-1))
    before = weights[0]  # (h, p, R_1 .. R_(n-1)): the outer product of the rows
    factors = [after[0]]
    for weight, rest in zip(weights[1:-1], after[1:], strict=True):
        factors.append((before[..., None, :] @ _last_apart(rest, weight)).squeeze(-2))
        before = (before[..., None] @ weight[..., None, :]).flatten(-2)
    return [*factors, before @ matrix]


def _last_apart(flat: Tensor, weight: Tensor) -> Tensor:
    """(h, p, .. R) -> (h, p, .., R), where R is the rank of the last mode."""
    return flat.unflatten(-1, (-1, weight.size(-1)))


def _dense_factors(weights: Sequence[Tensor], core: Tensor, tensor: Tensor) -> list[Tensor]:
    """The factors for a full compatibility tensor: S x_m W_m over every other mode m, then C."""
    ranks, features = letters(len(weights))
    factors = []
    for n in range(len(weights)):
        state = core
        for m, weight in enumerate(weights):
            if m != n:
                state = mode_product(state, weight, m, len(weights))
        met = features.replace(features[n], ranks[n])
        factors.append(torch.einsum(f"h{features},h{met}->h{features[n]}{ranks[n]}", tensor, state))
    return factors


def mlsvd_core(core: Tensor) -> Tensor:
    """The core of the multilinear SVD of S itself (eq. 3-15): (h, R_1..R_D), all-orthogonal and ordered.

    Every S_(n) S_(n)^T of the result is diagonal with descending entries. Signs are deterministic, and
    gradients are finite where singular values repeat; see
    ``kernel_attention.tensors.multilinear.unfoldings.leading_eigenvectors``.
    """
    order = core.dim() - 1
    with without_autocast(core):
        exact = exactly(core)
        bases = [leading_eigenvectors(mode_gram(exact, n, order), exact.size(1 + n)) for n in range(order)]
        for n, basis in enumerate(bases):
            exact = mode_product(exact, basis.mT, n, order)
        return exact
