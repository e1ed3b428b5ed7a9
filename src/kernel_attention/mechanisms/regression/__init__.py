"""Regression attention: queries read a map that was fitted to the keys and values."""

from kernel_attention.mechanisms.regression.functional import delta_attention, ridge_attention
from kernel_attention.mechanisms.regression.layer import DeltaAttention, RidgeAttention

__all__ = ["DeltaAttention", "RidgeAttention", "delta_attention", "ridge_attention"]
