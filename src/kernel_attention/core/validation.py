"""Checks of constructors' arguments: each raises for the first argument that is wrong."""

import math
from numbers import Real

from kernel_attention.errors import InputError


def require_positive(**values: int) -> None:
    """Raise InputError for the first argument that is not a whole number of at least 1."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name}={value!r} must be a whole number of at least 1")


def require_probability(**values: float) -> None:
    """Raise InputError for the first argument outside [0, 1)."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < 1.0:
            raise InputError(f"{name}={value!r} must be a probability in [0, 1)")


def require_weight(**values: float) -> None:
    """Raise InputError for the first argument that is not a finite number of at least 0."""
    for name, value in values.items():
        if not isinstance(value, Real) or not 0.0 <= value < math.inf:
            raise InputError(f"{name}={value!r} must be a finite number of at least 0")
