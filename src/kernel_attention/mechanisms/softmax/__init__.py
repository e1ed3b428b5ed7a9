"""Canonical softmax attention and its symmetric form: the baselines."""

from kernel_attention.mechanisms.softmax.functional import softmax_attention
from kernel_attention.mechanisms.softmax.layer import SoftmaxAttention

__all__ = ["SoftmaxAttention", "softmax_attention"]
