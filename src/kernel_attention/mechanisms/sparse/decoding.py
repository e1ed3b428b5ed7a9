"""Sparse attention one token at a time, with the cache of softmax attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention.core.decoding import KeyValueCache, Position
from kernel_attention.mechanisms.softmax.decoding import append_to_cache, blocks_reached
from kernel_attention.mechanisms.sparse.functional import SparsePattern, positions_seen


def sparse_step(
    pattern: SparsePattern,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cache: KeyValueCache,
    position: Position,
    factor: int = 1,
) -> tuple[Tensor, KeyValueCache]:
    """The attention of one token, (B, h, 1, p), and the cache with it; q, k, v (B, h, 1, p)."""
    cache, keys, values = append_to_cache(k, v, cache, position, factor)
    token, num_keys = position.tokens, keys.size(2)
    reached = blocks_reached(position, num_keys, factor)
    if isinstance(token, Tensor):
        assert reached is not None
        mask = (reached & positions_seen(pattern, token, num_keys, factor=factor))[:, None, None]
        return scaled_dot_product_attention(q, keys, values, attn_mask=mask), cache
    query = torch.full((1,), token, device=q.device)
    seen = positions_seen(pattern, query, num_keys, factor=factor)[0].nonzero()[:, 0]
    keys, values = keys.index_select(2, seen), values.index_select(2, seen)
    return scaled_dot_product_attention(q, keys, values), cache
