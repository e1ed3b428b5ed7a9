"""Attention layers, the table of mechanisms, and the auxiliary objective."""

from kernel_attention.attention.base import AttentionLayer, PenalizedAttention, auxiliary_loss
from kernel_attention.attention.dual_multilinear import DualMultilinearAttention
from kernel_attention.attention.kernel_pca import RobustPrincipalAttention, ScaledAttention
from kernel_attention.attention.linear import LinearAttention
from kernel_attention.attention.multilinear import MultilinearAttention
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
from kernel_attention.attention.replacement import PATTERNS, replace_attention, timm_attention
from kernel_attention.attention.sharding import shard_sequence
from kernel_attention.attention.softmax import SoftmaxAttention
from kernel_attention.attention.sparse import SparseAttention
from kernel_attention.attention.support_vector import SupportVectorAttention
from kernel_attention.attention.tensor import TensorAttention

__all__ = [
    "MECHANISMS",
    "PATTERNS",
    "AttentionLayer",
    "AttentionSpec",
    "DualMultilinearAttention",
    "LinearAttention",
    "Mechanism",
    "MultilinearAttention",
    "PenalizedAttention",
    "PrimalAttention",
    "RobustPrincipalAttention",
    "ScaledAttention",
    "SoftmaxAttention",
    "SparseAttention",
    "SupportVectorAttention",
    "TensorAttention",
    "auxiliary_loss",
    "create_attention",
    "get_mechanism",
    "layer_specs",
    "list_attention",
    "replace_attention",
    "shard_sequence",
    "timm_attention",
]
