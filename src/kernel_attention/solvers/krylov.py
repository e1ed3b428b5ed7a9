"""Leading singular triplets of a matrix known by its products.

A block Krylov space of K^T K with Rayleigh-Ritz extraction from K itself, restarted when it grows long. The
space holds that of block power iteration, so it converges at least as fast; for a random start the number of
passes over K needed for a relative error eps is O(log n / sqrt(eps)) whatever the gaps (Musco, Musco,
"Randomized block Krylov methods for stronger and faster approximate singular value decomposition", NeurIPS
2015, theorem 1), and falls geometrically where there are gaps (Saad, "Numerical methods for large eigenvalue
problems", section 6.6). Restarting with Ritz vectors is that of Wu and Simon, "Thick-restart Lanczos", 2000.

Legend: K (n, m), s triplets, b = s + oversampling columns of a block.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.solvers.finite import binary_unit, require_finite
from kernel_attention.solvers.operators import MatrixOperator, ScaledOperator

_KERNEL = "the kernel matrix of X and Z"
_BLOCKS_BEFORE_RESTART = 6


class Triplets(NamedTuple):
    """``left`` (n, s), ``values`` (s,) from the largest, ``right`` (m, s), with K v and K^T u beside them.

    ``residual`` is the largest ||K^T u - sigma v|| over the first singular value.
    """

    left: Tensor
    values: Tensor
    right: Tensor
    left_scores: Tensor  # K v, (n, s)
    right_scores: Tensor  # K^T u, (m, s)
    num_visits: int
    residual: float


def dense_triplets(operator: MatrixOperator, rank: int) -> Triplets:
    """The same from a full decomposition. The scores come from K, not from the decomposition."""
    matrix = operator.dense()
    require_finite(_KERNEL, matrix)
    unit = binary_unit(matrix)
    matrix = matrix / unit
    left, values, right_t = torch.linalg.svd(matrix, full_matrices=False)
    left, values, right = left[:, :rank], values[:rank], right_t[:rank].mT
    scores = matrix.mT @ left
    error = _relative(scores - right * values, values)
    return Triplets(left, values * unit, right, (matrix @ right) * unit, scores * unit, 1, error)


def leading_triplets(
    operator: MatrixOperator,
    rank: int,
    *,
    n_oversamples: int = 10,
    tol: float | None = None,
    max_iter: int = 50,
    generator: torch.Generator | None = None,
) -> Triplets:
    """The ``rank`` leading singular triplets, to a residual of ``tol`` times the first singular value.

    Memory: O((n + m) b) besides what a product with the matrix needs. A matrix with fewer rows or columns
    than the Krylov space would get is decomposed in full.

    Args:
        operator: the matrix.
        rank: s.
        n_oversamples: columns of a block beyond s; the gap that convergence depends on is the one after them.
        tol: None: the square root of the precision, where the singular values have all their digits.
        max_iter: passes over the matrix; a RuntimeWarning where they do not suffice.
        generator: of the random start.
    """
    like, (_, m) = operator.like, operator.shape
    precision = torch.finfo(like.dtype)
    tol = precision.eps**0.5 if tol is None else tol
    width = rank + n_oversamples
    if _BLOCKS_BEFORE_RESTART * width >= min(operator.shape):
        return dense_triplets(operator, rank)  # the Krylov space would be as large as the matrix
    start = torch.randn(m, width, dtype=like.dtype, generator=generator).to(like.device)
    block = torch.linalg.qr(start)[0]
    basis, images, normals = (like.new_empty(size, 0) for size in (m, operator.shape[0], m))
    terms = 8 + max(operator.shape) ** 0.5  # rounding of a sum of n terms, in units of the precision
    visits, unit = 0, 1.0
    while True:
        image, normal = operator.normal(block)
        visits += 1
        require_finite(_KERNEL, image)
        if visits == 1 and not precision.tiny**0.25 < binary_unit(image) < precision.tiny**-0.25:
            # K^T K B may have left the range where K B has not: once more, with K in a unit of its own.
            unit = binary_unit(image)
            operator = ScaledOperator(operator, unit)
            continue
        basis = torch.cat([basis, block], dim=1)
        images = torch.cat([images, image], dim=1)
        normals = torch.cat([normals, normal], dim=1)
        factor, small = torch.linalg.qr(images)
        u, values, wt = torch.linalg.svd(small, full_matrices=False)
        left, values, w = factor @ u[:, :width], values[:width], wt[:width].mT
        size = values[0].clamp_min(operator.size)
        floor = terms * precision.eps * size
        inverse = torch.where(values > floor, 1 / values, 0.0)
        right, left_scores, right_scores = basis @ w, images @ w, (normals @ w) * inverse
        residual = right_scores - right * values
        norms = torch.linalg.vector_norm(residual, dim=0)
        goal = (tol * values[0]).clamp_min(floor)
        # K^T K v carries a rounding error of eps sigma_1^2, which 1 / sigma turns into that of K^T u.
        reachable = torch.maximum(goal, floor * size * inverse)
        found = bool((norms <= reachable)[:rank].all())
        if found and bool((reachable > goal)[:rank].any()):
            # That error is more than is asked for: from K itself.
            right_scores = operator.rmatmul(left)
            visits += 1
            residual = right_scores - right * values
            norms = torch.linalg.vector_norm(residual, dim=0)
            reachable = goal.expand_as(norms)
            found = bool((norms <= reachable)[:rank].all())
        if found or visits >= max_iter:
            break
        if basis.size(1) >= _BLOCKS_BEFORE_RESTART * width:
            basis, images, normals = right, left_scores, normals @ w
        block = _orthonormal(residual[:, norms > reachable], basis)
        if block.size(1) == 0:
            break  # the space holds all that K^T K makes of it
    error = _relative(residual[:, :rank], values)
    if not found:
        warnings.warn(
            f"{visits} passes over the matrix left a relative residual of {error:.1e}, more than "
            f"tol={tol:.1e}; raise max_iter, n_oversamples or tol",
            RuntimeWarning,
            stacklevel=2,
        )
    left, right, values = left[:, :rank], right[:, :rank], values[:rank]
    left_scores, right_scores = left_scores[:, :rank], right_scores[:, :rank]
    return Triplets(left, values * unit, right, left_scores * unit, right_scores * unit, visits, error)


def _relative(residual: Tensor, values: Tensor) -> float:
    largest = torch.linalg.vector_norm(residual, dim=0).max()
    return float(largest / values[0]) if values[0] > 0 else 0.0


def _orthonormal(block: Tensor, basis: Tensor) -> Tensor:
    """An orthonormal basis of what the columns, none zero, have outside the span of ``basis``.

    What is below sqrt(eps) of a column is left out. At most sqrt(eps) of the rest is rounding, and a second
    projection leaves eps of that. Anything smaller could be all rounding, in any direction, that of ``basis``
    included.
    """
    block = block / torch.linalg.vector_norm(block, dim=0)
    for _ in range(2):
        block, sizes, _ = torch.linalg.svd(block - basis @ (basis.mT @ block), full_matrices=False)
        block = block[:, sizes > torch.finfo(block.dtype).eps ** 0.5]
    return block
