"""Softmax attention that drops weights, with nothing of size N x S in memory.

PyTorch has no fused kernel with dropout on a CPU. Its formula holds the weights, the mask and their product
for the backward pass, which makes the training step of long sequences several times as slow. Here a block of
weights at a time goes through all steps and stays in a core's cache. The backward pass forms each block
again, and draws its mask again from the seed of the call. Where all weights are few, the formula costs less.

Legend: B batch, h heads, N queries, S keys, p head width, p_v width of the values.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.dropout import dropout, keep_factors
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    is_for_all_sizes,
    only_formulas,
)


def additive_mask(mask: Tensor | None, q: Tensor) -> Tensor | None:
    """The mask as a four-dimensional term of the logits: 0 where a key is seen and -inf elsewhere."""
    if mask is None:
        return None
    return (
        torch.zeros((), dtype=q.dtype, device=q.device)
        .masked_fill(~mask, -torch.inf)
        .expand(*(1,) * (4 - mask.dim()), *mask.shape)
    )


def every_query_sees_a_key(mask: Tensor | None, is_causal: bool) -> bool:
    """True where that is certain; it reads the values of a mask from ``additive_mask``."""
    if mask is None:
        return True
    best = mask[..., 0] if is_causal else mask.amax(dim=-1)
    return bool((best > -torch.inf).all())


def logit_gradients(weights: Tensor, d_weights: Tensor) -> Tensor:
    """The gradient of the logits from that of the weights of their softmax, which is overwritten."""
    d_weights -= (weights * d_weights).sum(dim=-1, keepdim=True)
    return d_weights.mul_(weights)


def softmax_weights(
    queries: Tensor,
    keys: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    start: int = 0,
    *,
    all_see: bool = False,
) -> Tensor:
    """softmax(q k^T + mask) of scaled queries, differentiable, (B, h, N, S); zeros for a query that sees no
    key.

    ``mask`` is from ``additive_mask``, ``start`` the position of the first query. ``all_see``, that
    ``every_query_sees_a_key``, saves three passes over the weights.
    """
    logits = queries @ keys.mT
    # In place, but for torch.func: a vmap over the masks alone needs more room, a linearisation a new tensor.
    is_new = only_formulas() is not None
    add, fill = (Tensor.add, Tensor.masked_fill) if is_new else (Tensor.add_, Tensor.masked_fill_)
    if mask is not None:
        logits = add(logits, mask)
    if is_causal:
        position = torch.arange(start, start + logits.size(2), device=logits.device)
        future = torch.arange(logits.size(3), device=logits.device) > position[:, None]
        logits = fill(logits, future, -torch.inf)
    if mask is None or all_see:
        return logits.softmax(dim=-1)
    # A query that sees no key has no softmax. Its weights are zero, and so are their gradients.
    unseen = logits.detach().amax(dim=-1, keepdim=True) == -torch.inf
    return fill(logits, unseen, 0.0).softmax(dim=-1).masked_fill(unseen, 0.0)


_BLOCK = 2**18  # weights at a time: 1 MiB in float32, about the second-level cache of a core
_FEW = 2**21  # weights in all, up to which the formula is as fast
_LEAST_ROWS = 64  # queries at a time, however many keys there are: fewer make slow products


def softmax_dropout_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
    scale: float,
) -> Tensor:
    """dropout(softmax(scale q k^T + mask)) v on a CPU in float32 or float64, (B, h, N, p_v).

    It can be differentiated any number of times. ``mask`` is from ``additive_mask``; the other arguments are
    those of ``fused_attention``.
    """
    shape = torch.broadcast_shapes(q.shape[:2], k.shape[:2], v.shape[:2])
    if math.prod(shape) * q.size(2) * k.size(2) <= _FEW or only_formulas():
        all_see = not is_for_all_sizes() and every_query_sees_a_key(mask, is_causal)
        return dropout(softmax_weights(q * scale, k, mask, is_causal, all_see=all_see), dropout_p) @ v
    q, k, v = (x.expand(*shape, *x.shape[2:]) for x in (q, k, v))
    return _DroppedAttention.apply(q, k, v, mask, is_causal, dropout_p, scale)


class _Block(NamedTuple):
    """Queries of some heads of some sequences, and the keys that they may see."""

    sequences: slice
    heads: slice
    queries: slice
    keys: slice

    def rows(self, x: Tensor) -> Tensor:
        """The block of a tensor with a row for each query, (B, h, N, p)."""
        return x[self.sequences, self.heads, self.queries]

    def columns(self, x: Tensor) -> Tensor:
        """The block of a tensor with a row for each key, (B, h, S, p)."""
        return x[self.sequences, self.heads, self.keys]

    def square(self, x: Tensor) -> Tensor:
        """The block of (B, h, N, S)."""
        return x[self.sequences, self.heads, self.queries, self.keys]


class _Weights:
    """The blocks of the weights of one call, the same ones whenever they are asked for."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        is_causal: bool,
        dropout_p: float,
        scale: float,
        seed: int,
    ) -> None:
        self.queries, self.keys, self.is_causal, self.dropout_p = q * scale, k, is_causal, dropout_p
        self.shape = torch.Size((*q.shape[:3], k.size(2)))
        self.mask = None if mask is None else mask.expand(self.shape)
        self.all_see = every_query_sees_a_key(mask, is_causal)
        self.seed = seed

    def blocks(self) -> Iterator[tuple[_Block, Tensor, Tensor]]:
        """Each block with its weights and with their factors: 0, or 1 over the chance of staying."""
        for block, factor in self._factors():
            weights = softmax_weights(
                block.rows(self.queries),
                block.columns(self.keys),
                None if self.mask is None else block.square(self.mask),
                self.is_causal,
                block.queries.start,
                all_see=self.all_see,
            )
            yield block, weights, factor

    def factors(self) -> Tensor:
        """The factors of all weights, (B, h, N, S)."""
        factors = self.queries.new_zeros(self.shape)
        for block, factor in self._factors():
            block.square(factors).copy_(factor)
        return factors

    def _factors(self) -> Iterator[tuple[_Block, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        for block in _blocks(self.shape, self.is_causal):
            shape = [len(range(*at.indices(size))) for at, size in zip(block, self.shape, strict=True)]
            yield block, keep_factors(shape, self.dropout_p, self.queries.dtype, generator)


def _blocks(shape: torch.Size, is_causal: bool) -> Iterator[_Block]:
    """As many whole sequences as fit, or as many heads of one, or as many queries of one head."""
    batch, heads, queries, keys = shape
    rows = max(_LEAST_ROWS, _BLOCK // max(keys, 1))
    several = max(1, _BLOCK // max(queries * keys, 1)) if queries <= rows else 1
    heads_at, sequences_at = min(several, heads), max(1, several // heads)
    for sequence in range(0, batch, sequences_at):
        for head in range(0, heads, heads_at):
            for start in range(0, queries, rows):
                stop = min(start + rows, queries)
                yield _Block(
                    slice(sequence, sequence + sequences_at),
                    slice(head, head + heads_at),
                    slice(start, stop),
                    slice(0, min(stop, keys) if is_causal else keys),
                )


class _DroppedAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Tensor:
        mask, *ctx.options = options
        ctx.options.append(int(torch.empty((), dtype=torch.int64).random_()))
        ctx.save_for_backward(q, k, v, mask)
        out = q.new_empty(q.size(0), q.size(2), q.size(1), v.size(3)).transpose(1, 2)
        for block, weights, factor in _Weights(q, k, mask, *ctx.options).blocks():
            block.rows(out).copy_(weights.mul_(factor) @ block.columns(v))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        q, k, v, mask = ctx.saved_tensors
        if torch.is_grad_enabled():
            found = _differentiable_gradients(q, k, v, mask, ctx.options, ctx.needs_input_grad[:3], grad)
            return (*found, None, None, None, None)
        *_, scale, _ = ctx.options
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        drawn = _Weights(q, k, mask, *ctx.options)
        for block, weights, factor in drawn.blocks():
            slope = block.rows(grad)
            change = (slope @ block.columns(v).mT).mul_(factor)
            block.columns(grad_v).add_(factor.mul_(weights).mT @ slope)
            change = logit_gradients(weights, change)
            block.rows(grad_q).copy_(change @ block.columns(k))
            block.columns(grad_k).add_(change.mT @ block.rows(drawn.queries))
        return grad_q.mul_(scale), grad_k, grad_v, None, None, None, None


def _differentiable_gradients(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, options: list[Any], needed: Sequence[bool],
    grad: Tensor,
) -> list[Tensor | None]:  # fmt: skip
    """The gradients of q, k and v by the formula, which holds all weights."""
    is_causal, _, scale, _ = options
    factors = _Weights(q, k, mask, *options).factors()
    leaves = differentiable_leaves((q, k, v), needed)
    queries, keys, values = leaves
    y = (softmax_weights(queries * scale, keys, mask, is_causal) * factors) @ values
    return differentiable_gradients((y,), leaves, needed, (grad,))
