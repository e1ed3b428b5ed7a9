"""Softmax attention over a fixed pattern of positions. Built on the softmax family: its cache is the same."""

from kernel_attention.mechanisms.sparse.functional import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.mechanisms.sparse.layer import SparseAttention

__all__ = ["SparseAttention", "SparsePattern", "sparse_attention", "sparse_mask"]
