"""Regression attention: queries read a map that was fitted to the keys and values."""

from kernel_attention.mechanisms.regression.functional import ridge_attention
from kernel_attention.mechanisms.regression.layer import RidgeAttention

__all__ = ["RidgeAttention", "ridge_attention"]
