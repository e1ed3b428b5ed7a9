"""Robust principal component attention and scaled attention, built on the softmax family."""

from kernel_attention.mechanisms.kernel_pca.layer import RobustPrincipalAttention, ScaledAttention

__all__ = ["RobustPrincipalAttention", "ScaledAttention"]
