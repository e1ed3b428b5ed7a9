"""Attention layers, the table of mechanisms, and the auxiliary objective."""

from kernel_attention.attention.base import AttentionLayer, PenalizedAttention, auxiliary_loss
from kernel_attention.attention.primal import PrimalAttention
from kernel_attention.attention.registry import (
    MECHANISMS,
    AttentionSpec,
    Mechanism,
    create_attention,
    get_mechanism,
    layer_specs,
    list_attention,
)
from kernel_attention.attention.softmax import SoftmaxAttention

__all__ = [
    "MECHANISMS",
    "AttentionLayer",
    "AttentionSpec",
    "Mechanism",
    "PenalizedAttention",
    "PrimalAttention",
    "SoftmaxAttention",
    "auxiliary_loss",
    "create_attention",
    "get_mechanism",
    "layer_specs",
    "list_attention",
]
