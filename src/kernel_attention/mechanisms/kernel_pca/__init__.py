"""Robust principal component attention and scaled attention, built on the softmax family."""

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
