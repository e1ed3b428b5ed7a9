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
        """Softmax attention to keys that may be pooled over blocks."""
        return softmax_over_blocks(q, k, v, **options)

    def empty_memory(self, like: Tensor) -> KeyValueCache:
        """A cache without keys; ``like`` is (B, h, N, p)."""
        return empty_cache(like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> KeyValueCache:
        """The cache after a prompt; k and v are (B, h, N, p)."""
        return read_cache(k, v, factor)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: KeyValueCache, position: Position, factor: int = 1
    ) -> tuple[Tensor, KeyValueCache]:
        """Append one key and value to the cache, and attend to all of its keys."""
        return softmax_step(q, k, v, memory, position, factor)
