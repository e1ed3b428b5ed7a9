"""Softmax attention over a fixed pattern of positions, with the cache of the softmax family."""

from kernel_attention.mechanisms.sparse.functional import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.mechanisms.sparse.layer import SparseAttention

__all__ = ["SparseAttention", "SparsePattern", "sparse_attention", "sparse_mask"]
