"""Matrices that are used through products only: in memory, evaluated block by block, or foreign.

Legend: K (n, m); B (m, k), C (n, k).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import size_of
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
    """k(x_i, z_j), evaluated in blocks of rows whenever it is multiplied.

    Args:
        kernel: from ``kernel_attention.tensors.features.kernel_functions.get_kernel_function``.
        x: (n, p).
        z: (m, p).
        block_size: rows of a block; None: as many as fit the cache.
        reference: what rows are normalised over, (m', p); None: z.
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
