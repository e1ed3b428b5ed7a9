"""The support-vector layers one token at a time: states, running moments, the open block of pooled tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernel_attention.core.decoding import Position, State, before, new_where, scale_by
from kernel_attention.tensors.affine import wide
from kernel_attention.tensors.pooling import Pooling
from kernel_attention.tensors.statistics import accumulation_dtype, exactly


@dataclass(frozen=True)
class Moments(State):
    """The running moments of Attention-BN's keys, all (B, h, 1, p).

    They are the first key, and the mean and the sum of squared deviations of the completed blocks' keys minus
    the first key.
    """

    first: Tensor
    mean: Tensor
    squares: Tensor


def empty_moments(like: Tensor) -> Moments:
    """The moments of no keys; ``like`` (B, h, N, p) gives sizes, precision and device."""
    zeros = like.new_zeros(*like.shape[:2], 1, like.size(3), dtype=accumulation_dtype(like.dtype))
    return Moments(like.new_zeros(zeros.shape), zeros, zeros)


def read_moments(k: Tensor, lengths: Tensor, factor: int = 1) -> Moments:
    """The moments after a prompt k (B, h, N, p); row i is the open block at token i; lengths (B,)."""
    first = k[:, :, :1]
    blocks = (exactly(k) - first)[:, :, factor - 1 :: factor]
    done = before(lengths // factor, blocks.size(2))
    count = done.sum(dim=2, keepdim=True).clamp_min(1)
    mean = blocks.masked_fill(~done, 0.0).sum(dim=2, keepdim=True) / count
    squares = (blocks - mean).masked_fill(~done, 0.0).square().sum(dim=2, keepdim=True)
    return Moments(first, mean, squares)


def recentre_step(
    q: Tensor,
    k: Tensor,
    moments: Moments,
    position: Position,
    *,
    beta: float | Tensor,
    normalize: bool,
    eps: float,
    factor: int = 1,
) -> tuple[Tensor, Tensor, Moments]:
    """Attention-BN's query and key of one token, with the statistics of its prefix, and the new moments.

    This is the causal form of ``kernel_attention.functional.recentre``. Only the query carries the
    statistics, so the keys in the cache never change. Welford's recurrence adds the new key.
    """
    first = new_where(position.tokens == 0, k, moments.first)
    shifted = exactly(k) - first
    count = scale_by(position.block(factor), shifted)
    change = shifted - moments.mean
    mean = moments.mean + change / (count + 1)
    squares = moments.squares + change.square() * (count / (count + 1))
    complete = position.completes(factor)
    after = Moments(
        first, new_where(complete, mean, moments.mean), new_where(complete, squares, moments.squares)
    )
    query = q - beta * (mean + first)
    if not normalize:
        return query.to(q.dtype), k, after
    q, k = wide(q), wide(k)
    return (query / (squares / (count + 1) + eps)).to(q.dtype), k - first, after


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
