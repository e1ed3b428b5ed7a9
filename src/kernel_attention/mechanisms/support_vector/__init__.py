"""Attention as a support vector expansion: batch-normalised, scaled-heads and convolutional attention.

Built on the softmax, linear and sparse families, whose kernels it centres, pools and convolves.
"""

from kernel_attention.mechanisms.support_vector.functional import (
    batch_norm_attention,
    recentre,
    scaled_heads_attention,
    support_vector_attention,
)
from kernel_attention.mechanisms.support_vector.layer import SupportVectorAttention

__all__ = [
    "SupportVectorAttention",
    "batch_norm_attention",
    "recentre",
    "scaled_heads_attention",
    "support_vector_attention",
]
