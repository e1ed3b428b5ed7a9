"""Softmax over a pattern of positions, as a module."""

import math
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import KeyValueCache, Position
from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.errors import require_positive, unknown
from kernel_attention.mechanisms.softmax.kernel import (
    append_to_cache,
    attend_to_cache,
    blocks_reached,
    empty_cache,
    read_cache,
)
from kernel_attention.mechanisms.sparse.functional import (
    IMPLEMENTATIONS,
    Implementation,
    PatternName,
    SparsePattern,
    positions_seen,
    sparse_attention,
)

_DEFAULT_STRIDE = 16


class SparseKernel(AttentionKernel):
    """Softmax over the positions of a pattern of Child et al. (2019).

    The options are those of ``kernel_attention.functional.SparsePattern`` and ``sparse_attention``. Without
    ``stride`` it is sqrt(max_len) rounded, as the paper advises, or 16 without ``max_len``.
    """

    shift_invariant = True
    reads_positions = True

    def __init__(
        self,
        head_dim: int,
        max_len: int | None = None,
        *,
        pattern: PatternName = "strided",
        stride: int | None = None,
        summary: int = 1,
        impl: Implementation = "auto",
    ) -> None:
        super().__init__()
        if max_len is not None:
            require_positive(max_len=max_len)
        if stride is None:
            stride = _DEFAULT_STRIDE if max_len is None else max(1, round(math.sqrt(max_len)))
        if impl not in IMPLEMENTATIONS:
            raise unknown("impl", impl, IMPLEMENTATIONS)
        self.pattern = SparsePattern(pattern, stride, summary).check()
        self.impl: Implementation = impl

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, query_mask: Tensor | None = None, **options: Any
    ) -> Tensor:
        """Sparse attention with the pattern and the form that the kernel was made with."""
        return sparse_attention(q, k, v, self.pattern, impl=self.impl, **options)

    def empty_memory(self, like: Tensor) -> KeyValueCache:
        """A cache without keys; ``like`` is (B, h, N, p)."""
        return empty_cache(like)

    def read_memory(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, factor: int = 1) -> KeyValueCache:
        """The cache after a prompt; k and v are (B, h, N, p)."""
        return read_cache(k, v, factor)

    def step(
        self, q: Tensor, k: Tensor, v: Tensor, memory: KeyValueCache, position: Position, factor: int = 1
    ) -> tuple[Tensor, KeyValueCache]:
        """Append one key and value to the cache, and attend to the keys that the pattern shows."""
        return sparse_step(self.pattern, q, k, v, memory, position, factor)

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        name, stride, summary = self.pattern
        return f"pattern={name!r}, stride={stride}, summary={summary}, impl={self.impl!r}"


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
        return attend_to_cache(q, keys, values, mask), cache
    query = torch.full((1,), token, device=q.device)
    seen = positions_seen(pattern, query, num_keys, factor=factor)[0].nonzero()[:, 0]
    keys, values = keys.index_select(2, seen), values.index_select(2, seen)
    return attend_to_cache(q, keys, values), cache
