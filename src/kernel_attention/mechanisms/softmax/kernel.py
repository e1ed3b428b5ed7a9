"""The softmax kernel of queries and keys, as a module, and one token at a time with a cache of keys and
values.

Step by step a token has the output of the parallel causal form. ``factor`` is as in
``kernel_attention.tensors.blocks``: the key and value of the new token are those of its open block, pooled up
to the token. Row ``position // factor`` of the cache holds the open block until it is complete.

Legend: B batch, h heads, p head width, f factor, N tokens read, M = ceil(N / f) keys.
"""

from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import KeyValueCache, Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.tensors.blocks import softmax_over_blocks
from kernel_attention.tensors.softmax.attention import fused_attention
from kernel_attention.tensors.statistics import without_autocast


def empty_cache(like: Tensor) -> KeyValueCache:
    """The cache before the first token; ``like`` (B, h, N, p) gives sizes, precision and device."""
    nothing = like.new_zeros(*like.shape[:2], 0, like.size(3))
    return KeyValueCache(nothing, nothing)


def read_cache(k: Tensor, v: Tensor, factor: int = 1) -> KeyValueCache:
    """The cache after a prompt k, v (B, h, N, p); row i is the open block at token i.

    Rows past the completed blocks of a sequence are overwritten before it sees them.
    """
    return KeyValueCache(*(x[:, :, factor - 1 :: factor].contiguous() for x in (k, v)))


def append_to_cache(
    k: Tensor, v: Tensor, cache: KeyValueCache, position: Position, factor: int = 1
) -> tuple[KeyValueCache, Tensor, Tensor]:
    """The cache with one more key and value (B, h, 1, p), and all up to the token's block, (B, h, M, p)."""
    end = position.longest // factor + 1
    cache = cache.append(position.block(factor), end, k, v)
    return cache, cache.keys[:, :, :end], cache.values[:, :, :end]


def blocks_reached(position: Position, num_keys: int, factor: int = 1) -> Tensor | None:
    """Which of the keys each sequence has reached, (B, M) bool; None where all sequences reached all keys."""
    token = position.tokens
    if isinstance(token, int):
        return None
    return torch.arange(num_keys, device=token.device) <= (token // factor)[:, None]


def softmax_step(
    q: Tensor, k: Tensor, v: Tensor, cache: KeyValueCache, position: Position, factor: int = 1
) -> tuple[Tensor, KeyValueCache]:
    """The attention of one token, (B, h, 1, p), and the cache with it; q, k, v (B, h, 1, p)."""
    cache, keys, values = append_to_cache(k, v, cache, position, factor)
    reached = blocks_reached(position, keys.size(2), factor)
    mask = None if reached is None else reached[:, None, None]
    return attend_to_cache(q, keys, values, mask), cache


def attend_to_cache(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
    """Softmax attention of one token, (B, h, 1, p), in the precision of its query and that of the values.

    Attention-BN's queries are wider than a cache in float16, see ``kernel_attention.functional.recentre``.
    """
    with without_autocast(q):
        keys, wide_values = keys.to(q.dtype), values.to(q.dtype)
        return fused_attention(q, keys, wide_values, mask=mask).to(values.dtype)


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
