"""Robust principal component and scaled attention. Built on the softmax family, which attends in every step."""

from kernel_attention.mechanisms.kernel_pca.functional import (
    PrincipalPursuit,
    principal_attention_pursuit,
    pursuit_threshold,
    rpc_attention,
    scaled_attention,
)
from kernel_attention.mechanisms.kernel_pca.layer import RobustPrincipalAttention, ScaledAttention

__all__ = [
    "PrincipalPursuit",
    "RobustPrincipalAttention",
    "ScaledAttention",
    "principal_attention_pursuit",
    "pursuit_threshold",
    "rpc_attention",
    "scaled_attention",
]
