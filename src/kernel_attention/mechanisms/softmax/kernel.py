"""The softmax kernel of queries and keys, as a module."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from kernel_attention.core.decoding import KeyValueCache, Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.mechanisms.softmax.decoding import empty_cache, read_cache, softmax_step
from kernel_attention.tensors.blocks import softmax_over_blocks


class SoftmaxKernel(AttentionKernel):
    """softmax(q k^T / sqrt(p)), through PyTorch's fused attention."""

    shift_invariant = True

    def __init__(self, head_dim: int, max_len: int | None = None) -> None:
        super().__init__()

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, query_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """See [`AttentionKernel`][kernel_attention.core.kernel.AttentionKernel]."""
        return softmax_over_blocks(q, k, v, **options)

    def empty_memory(self, like: Tensor) -> KeyValueCache:
        """See [`AttentionKernel`][kernel_attention.core.kernel.AttentionKernel]."""
        return empty_cache(like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> KeyValueCache:
        """See [`AttentionKernel`][kernel_attention.core.kernel.AttentionKernel]."""
        return read_cache(k, v, factor)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: KeyValueCache, position: Position, factor: int = 1
    ) -> tuple[Tensor, KeyValueCache]:
        """See [`AttentionKernel`][kernel_attention.core.kernel.AttentionKernel]."""
        return softmax_step(q, k, v, memory, position, factor)
