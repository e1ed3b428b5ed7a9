"""Causal softmax heads over pooled keys in few launches, for accelerators, where each costs 5 to 10 us.

The queries of all heads are centred together, the keys and values of a pooled head are put together once, and
every gradient goes to its place in that of the projection.

Legend: B batch, N tokens, h heads, p head width; b the block of a token, o its place there, f factor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from kernel_attention.mechanisms.support_vector.head_groups import head_groups
from kernel_attention.tensors.blocks import add_open_block, attention_by_offset, completed, with_open_block
from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.pooling import block_within, running_pool
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.softmax.attention import fused_attention
from kernel_attention.tensors.statistics import accumulation_dtype

Groups = Sequence[tuple[slice, int]]


def pooled_launches(z: Tensor, factors: Sequence[int], beta: float, dropout_p: float) -> Tensor:
    """The outputs of all heads, (B, N, h, p), from queries, keys and values z, (B, N, 3, h, p).

    ``factors`` has one number for each head; ``beta`` is the weight of the keys' mean.
    """
    groups = [(heads, block_within(factor, z.size(1))) for heads, factor in head_groups(factors)]
    parts, outs, size = iter(_Parts.apply(z, groups, beta)), [], z.size(-1)
    for _, factor in groups:
        q, k, v = next(parts), next(parts), next(parts)
        if factor == 1:
            outs.append(fused_attention(q, k, v, is_causal=True, dropout_p=dropout_p))
        else:
            seen = attention_by_offset(q, k, v, factor, size**-0.5, dropout_p)
            outs.append(add_open_block(seen, next(parts)))
    return torch.cat([out.transpose(1, 2) for out in outs], dim=2)


class _Parts(torch.autograd.Function):
    """Queries, keys and values of every group; of a pooled one ``with_open_block``'s, and the pooled values.

    Where the gradient itself is differentiated, it comes from the formula.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor, groups: Groups, beta: float) -> tuple[Tensor, ...]:
        ctx.groups, ctx.beta = groups, beta
        parts, kept = _parts(z, groups, beta)
        ctx.save_for_backward(z, *kept)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        z, *kept = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((z,), (True,))
            parts, _ = _parts(leaves[0], ctx.groups, ctx.beta)
            return *differentiable_gradients(parts, leaves, (True,), grads), None, None
        dz, left, saved = torch.empty_like(z), iter(grads), iter(kept)
        planes = dz.permute(2, 0, 3, 1, 4)
        for heads, factor in ctx.groups:
            own = planes[:, :, heads]
            if factor == 1:
                for plane in own:
                    plane.copy_(next(left))
            else:
                _pooled_back(own, factor, [next(left) for _ in range(4)], [next(saved) for _ in range(3)])
        if ctx.beta:
            _centred_back(planes, ctx.groups, ctx.beta)
        return dz, None, None


def _parts(z: Tensor, groups: Groups, beta: float) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs, and what the backward pass reads of every pooled group: queries, keys, shares."""
    parts, kept = [], []
    q, *_ = planes = z.permute(2, 0, 3, 1, 4)
    if beta:
        q = _centred(planes, groups, beta)
    for heads, factor in groups:
        if factor == 1:
            parts += [q[:, heads], *planes[1:, :, heads]]
        else:
            k, v = running_pool(planes[1:, :, heads], factor)
            parts += [*with_open_block(q[:, heads], k, v, factor), v]
            kept += [q[:, heads], k, _pooling_shares(q, factor)]
    return parts, kept


def _pooling_shares(like: Tensor, factor: int) -> Tensor:
    """Token s's share of the open block at token t of its block, (factor, factor)."""

    def make() -> Tensor:
        share = 1 / torch.arange(1, factor + 1, dtype=like.dtype, device=like.device)
        return share.expand(factor, factor).triu()

    return kept_constant(("pooling shares", factor, like.dtype), like, make)


def _pooled_back(out: Tensor, factor: int, grads: Sequence[Tensor], kept: Sequence[Tensor]) -> None:
    """The gradients of a pooled group, in ``out`` (3, B, heads, N, p)."""
    (dq, *d_rows, d_open), (q, k, shares) = grads, kept
    length, size = q.shape[2:]
    slope = dq[..., size : size + 1]  # of the open block's logit
    torch.addcmul(dq[..., :size], slope, k, out=out[0])
    count = -(-length // factor)
    pooled = q.new_empty(2, *q.shape[:2], count * factor, size)
    if count * factor > length:
        pooled[..., length:, :].zero_()
    torch.mul(slope, q, out=pooled[0, :, :, :length])
    pooled[1, :, :, :length] = d_open
    for part, rows in zip(pooled, d_rows, strict=True):
        completed(part, factor, length).add_(rows[:, :, 1:, :size])
    rows = pooled.view(-1, factor, size)
    rows = torch.bmm(shares.expand(rows.size(0), -1, -1), rows)
    out[1:] = rows.view_as(pooled)[..., :length, :]


def _centred(planes: Tensor, groups: Groups, beta: float) -> Tensor:
    """The queries less beta times the mean of the pooled keys of their prefix, (B, h, N, p).

    With C the running sum of the keys, the pooled keys of b complete blocks and of the open one add up to
    C_(bf - 1) / f + (C_i - C_(bf - 1)) / (o + 1).
    """
    q, k, _ = planes
    sums = k.cumsum(dim=2, dtype=accumulation_dtype(k.dtype))
    last, _, _, (of_token, of_blocks) = _shares(planes, groups, beta)
    before = sums.flatten(1, 2).index_select(1, last).view_as(sums)
    return torch.addcmul(torch.addcmul(q, sums, of_token), before, of_blocks).to(q.dtype)


def _centred_back(planes: Tensor, groups: Groups, beta: float) -> None:
    """Add the gradients of the keys in ``_centred``, from those of the queries."""
    dq, dk, _ = planes
    _, later, has_later, shares = _shares(planes, groups, beta)
    sums = (dq[:, None] * shares).flip(3).cumsum(dim=3)
    own, blocks = sums.flatten(1, 3).index_select(1, later).view_as(sums).unbind(1)
    dk += torch.addcmul(own, blocks, has_later)


def _shares(planes: Tensor, groups: Groups, beta: float) -> tuple[Tensor, ...]:
    """Rows of (h, N) with C_(bf - 1); rows of the reversed (2, h, N) with the sums from the token on and from
    the next block on, and 1 where there is one; the shares of both in the shift, (2, h, N, 1).
    """
    heads, length = planes.size(2), planes.size(3)
    factors = [factor for heads_of, factor in groups for _ in range(heads_of.start, heads_of.stop)]
    dtype = accumulation_dtype(planes.dtype)

    def make() -> tuple[Tensor, ...]:
        token = torch.arange(length, device=planes.device)
        factor = torch.stack([torch.full_like(token[:1], each) for each in factors])  # asks no host
        row = torch.arange(heads, device=planes.device)[:, None] * length
        block, place = token // factor, token % factor
        start = block * factor
        of_token = -beta / ((block + 1) * (place + 1)).to(dtype)
        of_blocks = (-beta / (block + 1).to(dtype) / factor - of_token) * (block > 0)
        following = start + factor
        reverse = row + length - 1
        later = torch.stack([reverse - token, reverse - following.clamp_max(length - 1) + heads * length])
        has_later = (following < length).to(dtype)[..., None]
        last = (row + (start - 1).clamp_min(0)).flatten()
        return last, later.flatten(), has_later, torch.stack([of_token, of_blocks])[..., None]

    return kept_constant(("prefix shares", *factors, length, beta, dtype), planes, make)
