"""Linear attention: kernels with explicit features, including the cosine baseline."""

from kernel_attention.mechanisms.linear.functional import cosine_attention, linear_attention
from kernel_attention.mechanisms.linear.layer import LinearAttention

__all__ = ["LinearAttention", "cosine_attention", "linear_attention"]
