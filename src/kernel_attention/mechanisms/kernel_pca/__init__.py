"""Robust principal component and scaled attention. Built on the softmax family, which attends in every step."""

from kernel_attention.mechanisms.kernel_pca.layer import RobustPrincipalAttention, ScaledAttention

__all__ = ["RobustPrincipalAttention", "ScaledAttention"]
