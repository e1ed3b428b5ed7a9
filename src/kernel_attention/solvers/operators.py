"""Matrices that are used through products only, in memory, by blocks, or foreign, and their singular
triplets.

Legend: K (n, m); B (m, k), C (n, k); s triplets.
"""

import warnings
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import binary_unit, require_finite, size_of
from kernel_attention.tensors.features.kernel_functions import KernelFunction, takes_reference

_BLOCK_BYTES = 2**24  # a block that stays in the cache is evaluated and multiplied several times faster


class MatrixOperator(Protocol):
    """A matrix K (n, m) as its products; ``like`` is a tensor of its device and precision.

    Rounding of the products is relative to the norm of K, or to ``size`` where that is more.
    """

    shape: tuple[int, int]
    like: Tensor
    size: float

    def matmul(self, right: Tensor) -> Tensor:
        """K B, (n, k)."""

    def rmatmul(self, left: Tensor) -> Tensor:
        """K^T C, (m, k)."""

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        """K B and K^T K B, (n, k) and (m, k), for the price of one pass over the entries of K."""

    def dense(self) -> Tensor:
        """K itself."""


class DenseOperator:
    """A matrix in memory."""

    size = 0.0

    def __init__(self, matrix: Tensor) -> None:
        self.like = self.matrix = matrix
        self.shape = (matrix.size(0), matrix.size(1))

    def matmul(self, right: Tensor) -> Tensor:
        return self.matrix @ right

    def rmatmul(self, left: Tensor) -> Tensor:
        return self.matrix.mT @ left

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        image = self.matrix @ right
        return image, self.matrix.mT @ image

    def dense(self) -> Tensor:
        return self.matrix


class KernelOperator:
    """k(x_i, z_j) of x (n, p) and z (m, p), evaluated in blocks of rows whenever it is multiplied.

    ``kernel`` is from ``get_kernel_function``. ``block_size`` rows are a block; None: as many as fit the
    cache. Rows are normalised over ``reference`` (m', p); None: z.
    """

    size = 0.0

    def __init__(
        self,
        kernel: KernelFunction,
        x: Tensor,
        z: Tensor,
        block_size: int | None = None,
        reference: Tensor | None = None,
    ) -> None:
        self.kernel, self.x, self.z = kernel, x, z
        self.like = z
        self.shape = (x.size(0), z.size(0))
        self.block_size = block_size or max(1, _BLOCK_BYTES // (z.element_size() * max(1, z.size(0))))
        self._options = {} if reference is None or not takes_reference(kernel) else {"reference": reference}

    def block(self, start: int, stop: int) -> Tensor:
        """Rows start..stop of K.

        Raises:
            InputError: for a kernel that returns another shape.
        """
        rows = self.x[start:stop]
        block = self.kernel(rows, self.z, **self._options)
        if not isinstance(block, Tensor) or block.shape != (rows.size(0), self.shape[1]):
            found = tuple(block.shape) if isinstance(block, Tensor) else type(block).__name__
            expected = (rows.size(0), self.shape[1])
            raise InputError(f"kernel must return a tensor of shape {expected} for these rows, not {found}")
        return block

    def _starts(self) -> range:
        return range(0, self.shape[0], self.block_size)

    def matmul(self, right: Tensor) -> Tensor:
        image = right.new_empty(self.shape[0], right.size(1))
        for start in self._starts():
            stop = start + self.block_size
            image[start:stop] = self.block(start, stop) @ right
        return image

    def rmatmul(self, left: Tensor) -> Tensor:
        total = left.new_zeros(self.shape[1], left.size(1))
        for start in self._starts():
            stop = start + self.block_size
            total.addmm_(self.block(start, stop).mT, left[start:stop])
        return total

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        image = right.new_empty(self.shape[0], right.size(1))
        total = right.new_zeros(self.shape[1], right.size(1))
        for start in self._starts():
            stop = start + self.block_size
            block = self.block(start, stop)
            image[start:stop] = block @ right
            total.addmm_(block.mT, image[start:stop])
        return image, total

    def dense(self) -> Tensor:
        matrix = self.z.new_empty(self.shape)
        for start in self._starts():
            matrix[start : start + self.block_size] = self.block(start, start + self.block_size)
        return matrix


class ForeignOperator:
    """An object with ``shape``, and ``matmul`` and ``rmatmul`` on tensors or, as SciPy's LinearOperator has,
    ``matmat`` and ``rmatmat`` on arrays.
    """

    size = 0.0

    def __init__(self, operator: Any) -> None:
        self.operator = operator
        self.shape = (int(operator.shape[0]), int(operator.shape[1]))
        self._is_torch = hasattr(operator, "matmul") and hasattr(operator, "rmatmul")
        dtype = torch.float32 if "float32" in str(getattr(operator, "dtype", "")) else torch.float64
        self.like = torch.empty(0, dtype=dtype, device=getattr(operator, "device", None))

    def matmul(self, right: Tensor) -> Tensor:
        return self._product("matmul" if self._is_torch else "matmat", right, self.shape[0])

    def rmatmul(self, left: Tensor) -> Tensor:
        return self._product("rmatmul" if self._is_torch else "rmatmat", left, self.shape[1])

    def _product(self, name: str, factor: Tensor, rows: int) -> Tensor:
        method = getattr(self.operator, name)
        found = method(factor) if self._is_torch else torch.from_numpy(np.asarray(method(factor.numpy())))
        if tuple(found.shape) != (rows, factor.size(1)):
            expected = (rows, factor.size(1))
            raise InputError(
                f"{name} of the operator returned shape {tuple(found.shape)}, expected {expected}"
            )
        return found.to(factor)

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        image = self.matmul(right)
        return image, self.rmatmul(image)

    def dense(self) -> Tensor:
        return self.matmul(torch.eye(self.shape[1], dtype=self.like.dtype, device=self.like.device))


class CenteredOperator:
    """(I - 1 1^T / n) K (I - 1 1^T / m): the kernel of feature vectors with their means taken off."""

    def __init__(self, operator: MatrixOperator) -> None:
        self.operator, self.shape, self.like = operator, operator.shape, operator.like
        ones = [torch.ones(n, 1, dtype=self.like.dtype, device=self.like.device) for n in self.shape]
        self._column_sums, row_sums = operator.rmatmul(ones[0]), operator.matmul(ones[1])
        # Centring subtracts no more than the size of K, and leaves rounding errors of that size.
        taken = (self._column_sums / self.shape[0] ** 0.5, row_sums / self.shape[1] ** 0.5)
        self.size = max(size_of(part) for part in taken)

    def matmul(self, right: Tensor) -> Tensor:
        return centered(self.operator.matmul(centered(right)))

    def rmatmul(self, left: Tensor) -> Tensor:
        return centered(self.operator.rmatmul(centered(left)))

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        image, total = self.operator.normal(centered(right))
        # The product ignored the mean of K B, so K^T 1 times that mean is subtracted afterwards.
        return centered(image), centered(total - self._column_sums * image.mean(dim=0))

    def dense(self) -> Tensor:
        return centered(centered(self.operator.dense()).mT).mT


class ScaledOperator:
    """K over a power of two, so that products with K^T K stay in range."""

    def __init__(self, operator: MatrixOperator, unit: float) -> None:
        self.operator, self.shape, self.like, self.unit = operator, operator.shape, operator.like, unit
        self.size = operator.size / unit

    def matmul(self, right: Tensor) -> Tensor:
        return self.operator.matmul(right / self.unit)

    def rmatmul(self, left: Tensor) -> Tensor:
        return self.operator.rmatmul(left / self.unit)

    def normal(self, right: Tensor) -> tuple[Tensor, Tensor]:
        image, total = self.operator.normal(right / self.unit)
        return image, total / self.unit

    def dense(self) -> Tensor:
        return self.operator.dense() / self.unit


def centered(matrix: Tensor) -> Tensor:
    """The columns of (n, k), each less its mean."""
    return matrix - matrix.mean(dim=0)


def is_operator(value: Any) -> bool:
    """True where the value is a matrix by its products: no tensor and no array, but with both products."""
    if isinstance(value, (Tensor, np.ndarray)) or not hasattr(value, "shape"):
        return False
    pairs = (("matmul", "rmatmul"), ("matmat", "rmatmat"))
    return any(all(callable(getattr(value, name, None)) for name in pair) for pair in pairs)


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

    A block Krylov space of K^T K with Rayleigh-Ritz extraction from K itself, restarted when it grows long.
    The space holds that of block power iteration, so it converges at least as fast; for a random start the
    passes over K needed for a relative error eps are O(log n / sqrt(eps)) whatever the gaps (Musco, Musco,
    "Randomized block Krylov methods for stronger and faster approximate singular value decomposition",
    NeurIPS 2015, theorem 1), and fall geometrically where there are gaps (Saad, "Numerical methods for large
    eigenvalue problems", section 6.6). Restarting with Ritz vectors is that of Wu and Simon, "Thick-restart
    Lanczos", 2000.

    Memory: O((n + m) b), b = s + ``n_oversamples``, besides what a product with the matrix needs. A matrix
    with fewer rows or columns than the Krylov space would get is decomposed in full.

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
