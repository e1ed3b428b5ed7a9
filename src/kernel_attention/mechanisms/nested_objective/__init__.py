"""The nested objective: the low-rank approximation whose minimum is the kernel SVD, in order."""

from kernel_attention.mechanisms.nested_objective.functional import (
    KernelGrams,
    kernel_grams,
    nested_objective,
)

__all__ = ["KernelGrams", "kernel_grams", "nested_objective"]
