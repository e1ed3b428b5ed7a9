"""The support-vector layers one token at a time: their states, and the open block of pooled tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import Position, State, new_where, scale_by
from kernel_attention.mechanisms.support_vector.moments import Moments
from kernel_attention.tensors.pooling import Pooling
from kernel_attention.tensors.statistics import accumulation_dtype


@dataclass(frozen=True)
class HeadsState(State):
    """The state of the heads of one factor f.

    Attributes:
        memory: one key and value for every block of f tokens, or their running sum.
        open_block: the sum of the open block's tokens, or their maximum, (B, 1, d); None where f is 1.
        moments: the running moments of the keys; None without centring.
    """

    memory: Any
    open_block: Tensor | None = None
    moments: Moments | None = None


@dataclass(frozen=True)
class SupportVectorState(State):
    """The state of a support-vector layer.

    It holds the number of tokens read, one state for each run of heads with the same factor, and the last
    s - 1 rows of the input of a convolution, (B, s - 1, d) each.
    """

    position: Position
    heads: tuple[HeadsState, ...]
    window: tuple[Tensor, ...] = ()


def add_to_block(
    x: Tensor, block: Tensor, position: Position, factor: int, pooling: Pooling, weight: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The open block with one more token: pooled, and as a sum.

    Args:
        x: the token, (B, 1, d).
        block: the sum of the open block's tokens, or their maximum, (B, 1, d).
        position: the position of the token.
        factor: tokens per block.
        pooling: as in ``kernel_attention.tensors.pooling.pool``.
        weight: of pooling "conv", (d, factor); None otherwise.
    """
    offset = position.offset(factor)
    is_max = pooling == "max"
    block = new_where(offset == 0, torch.full_like(block, -math.inf if is_max else 0.0), block)
    if is_max:
        block = torch.maximum(block, x.to(block.dtype))
        return block.to(x.dtype), block
    weighed = x
    if weight is not None:
        row = factor * weight.mT[offset]  # (d,) or (B, d)
        weighed = x * (row if isinstance(offset, int) else row[:, None])
    block = block + weighed
    return (block / scale_by(offset + 1, block)).to(x.dtype), block


def read_open_block(
    x: Tensor, lengths: Tensor, factor: int, pooling: Pooling, weight: Tensor | None
) -> Tensor:
    """The sum of the open block after a prompt x (B, N, d), (B, 1, d); arguments as in ``add_to_block``."""
    token = torch.arange(x.size(1), device=x.device)
    inside = (token < lengths[:, None]) & (token >= (lengths // factor * factor)[:, None])
    rows = x.to(accumulation_dtype(x.dtype))
    if pooling == "max":
        return rows.masked_fill(~inside[..., None], -math.inf).amax(dim=1, keepdim=True)
    if weight is not None:
        rows = rows * factor * weight.mT[token % factor]
    return rows.masked_fill(~inside[..., None], 0.0).sum(dim=1, keepdim=True)


def last_rows(x: Tensor, lengths: Tensor, size: int) -> Tensor:
    """The last ``size`` of each sequence's real rows, zeros before its first: (B, N, d) -> (B, size, d)."""
    index = lengths[:, None] - size + torch.arange(size, device=x.device)
    rows = x.gather(1, index.clamp_min(0)[..., None].expand(-1, -1, x.size(2)))
    return rows.masked_fill(index[..., None] < 0, 0.0)
