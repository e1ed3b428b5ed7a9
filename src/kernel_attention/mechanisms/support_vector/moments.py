"""The running moments of Attention-BN's keys, for decoding: Welford's recurrence."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kernel_attention.core.decoding import Position, State, before, new_where, scale_by
from kernel_attention.tensors.statistics import accumulation_dtype, exactly


@dataclass(frozen=True)
class Moments(State):
    """The moments of the keys, all (B, h, 1, p).

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
    blocks = exactly((k - first)[:, :, factor - 1 :: factor])
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
    shifted = exactly(k - first)
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
    return (query / (squares / (count + 1) + eps)).to(q.dtype), k - first, after
