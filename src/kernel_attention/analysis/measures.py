"""Measures of one sequence's attention: functions of its matrix alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.tensors.multilinear.unfoldings import unfold


def singular_values(matrix: Tensor) -> Tensor:
    """Singular values of every head's matrix (h, n, m), descending, (h, min(n, m))."""
    return torch.linalg.svdvals(matrix)


def mode_singular_values(tensor: Tensor) -> list[Tensor]:
    """Singular values of every unfolding of a kernel tensor (h, n_1, .., n_D): (h, n_n) each, descending.

    They are the norms of the slices of the multilinear SVD's core along mode n, whose squares the KMLSVD
    thesis (section 4-2-4) reads from the diagonal of S_(n) S_(n)^T.
    """
    order = tensor.dim() - 1
    exact = tensor.double()
    found = []
    for mode in range(order):
        # Not from the Gram matrix, whose rounding would leave a zero at 1e-8 of the largest.
        values = torch.linalg.svdvals(unfold(exact, mode, order))
        missing = tensor.size(1 + mode) - values.size(-1)  # rows beyond the columns
        found.append(torch.nn.functional.pad(values, (0, missing)).to(tensor.dtype))
    return found


def explained_variance(values: Tensor) -> Tensor:
    """sum_{j <= i} sigma_j^2 / sum_j sigma_j^2 of singular values (..., k); all 1 for a zero matrix."""
    energy = values.double().square().cumsum(-1)
    total = energy[..., -1:]
    return torch.where(total > 0, energy / total, 1.0).to(values.dtype)


def effective_rank(values: Tensor) -> Tensor:
    """exp of the entropy of sigma_i / sum_j sigma_j, (..., k) -> (...); Roy and Vetterli, EUSIPCO 2007.

    k for k equal singular values, 1 for a matrix of rank 1, 0 for a zero matrix.
    """
    total = values.sum(-1, keepdim=True)
    share = values / torch.where(total > 0, total, 1.0)
    entropy = -torch.xlogy(share, share).sum(-1)
    return torch.where(total[..., 0] > 0, entropy.exp(), 0.0)


def numerical_rank(values: Tensor) -> Tensor:
    """Number of singular values (..., k) above the rounding error of the largest."""
    size = values.size(-1) * torch.finfo(values.dtype).eps
    return (values > size * values[..., :1]).sum(-1)


def head_distances(heads: Tensor) -> Tensor:
    """L2 distance between the heads' rows, averaged over the rows: (h, n, m) -> (h, h), the diagonal zero."""
    differences = heads[:, None] - heads[None]
    return torch.linalg.vector_norm(differences, dim=-1).mean(-1)


def head_matrix_distances(heads: Tensor) -> Tensor:
    """Frobenius distance between the heads' matrices: (h, n, m) -> (h, h), the diagonal zero."""
    differences = heads[:, None] - heads[None]
    return torch.linalg.matrix_norm(differences)


def mean_of_pairs(matrix: Tensor) -> Tensor:
    """Mean over the pairs of different heads, (h, h) -> (); NaN for a single head."""
    heads = matrix.size(-1)
    if heads < 2:
        return matrix.new_tensor(torch.nan)
    return (matrix.sum() - matrix.diagonal().sum()) / (heads * (heads - 1))


def above_diagonal(matrices: Tensor) -> Tensor:
    """The entries of the pairs of different heads, (..., h, h) -> (..., h (h - 1) / 2)."""
    pairs = torch.ones(matrices.shape[-2:], dtype=torch.bool, device=matrices.device).triu(1)
    return matrices[..., pairs]


def resized(values: Tensor, count: int, fill: float = 0.0) -> Tensor:
    """The first ``count`` of (..., k), ``fill`` where there are fewer."""
    missing = max(count - values.size(-1), 0)
    return torch.nn.functional.pad(values[..., :count], (0, missing), value=fill)
