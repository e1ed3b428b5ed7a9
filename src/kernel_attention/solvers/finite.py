"""Checks for finite numbers, and computations that do not overflow."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kernel_attention.errors import InputError


def require_finite(name: str, x: Tensor) -> None:
    """Refuse an argument that holds NaN or infinity.

    Raises:
        InputError: with the argument's name.
    """
    if not x.isfinite().all():
        raise InputError(f"{name} holds NaN or infinity, expected finite numbers")


def require_range(name: str, results: str, *computed: Tensor) -> None:
    """Refuse a finite argument whose ``results`` are not finite.

    Raises:
        InputError: with the argument's name.
    """
    for part in computed:
        if not part.isfinite().all():
            raise InputError(
                f"{name} holds numbers so large that {results} leave the range of {part.dtype}: scale {name}"
            )


def binary_unit(x: Tensor) -> float:
    """The largest power of two that is no larger than the largest entry's size; 1 where all are zero.

    Division by it is exact, and later squares of the quotients do not overflow. It is kept between the
    smallest normal number and its inverse, so that its own inverse does not overflow.
    """
    largest = float(x.abs().max()) if x.numel() else 0.0
    if largest == 0.0 or not math.isfinite(largest):
        return 1.0
    tiny = torch.finfo(x.dtype).tiny
    return min(max(math.ldexp(1.0, math.frexp(largest)[1] - 1), tiny), 1 / tiny)


def size_of(x: Tensor) -> float:
    """The 2-norm of all entries, whose squares may overflow."""
    unit = binary_unit(x)
    return unit * float(torch.linalg.vector_norm(x / unit))


def times_exp(x: Tensor, exponent: Tensor) -> Tensor:
    """x exp(exponent): 0 where x is 0, and infinite only where the product itself overflows."""
    # In two steps: where the square root overflows, so does its square times any normal number.
    root = (exponent / 2).exp()
    return torch.where(x == 0, 0.0, x * root * root)
