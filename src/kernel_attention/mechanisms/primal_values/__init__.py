"""Primal attention with values: the rank-s model of a kernel, applied to the tokens' values.

It has the scores of primal attention, draws them to the kernel's SVD by the nested objective, and is linear
attention, or ridge regression, with the scores for features.
"""

from kernel_attention.mechanisms.primal_values.functional import primal_value_attention
from kernel_attention.mechanisms.primal_values.layer import PrimalValueAttention

__all__ = ["PrimalValueAttention", "primal_value_attention"]
