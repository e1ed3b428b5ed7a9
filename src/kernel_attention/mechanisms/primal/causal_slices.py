"""The causal data-dependent layer over the tokens, forward and backward, in slices that fit the cache.

A token's output is [phi(q_i) ; phi(k_i)] G_i, where G_i = [W_{e|X} C_e^T ; W_{r|X} C_r^T] depends on the
rows that the token has seen. As in ``seen_rows``, a block of tokens shares the part of G_i that comes from
the blocks before, and meets the few rows of its own one by one. Rows, weights and concat map are multiplied
out before the pass, which automatic differentiation sees to. The pass keeps nothing but its inputs, and
computes phi again in the backward pass.

How many rows lie in a block is a question about values, so a compiler takes the formulas.

Legend: B batch, N tokens, h heads, p head width, d = h p, s rank, M sampled rows, T tokens of a block, C rows
of a block at most.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.mechanisms.primal.fused import PrimalWeights, side_by_side
from kernel_attention.mechanisms.primal.operators import differentiable_features, with_rows
from kernel_attention.mechanisms.primal.token_slices import (
    Rooms,
    Tokens,
    add_product,
    add_rows,
    features_back,
    fill_features,
)
from kernel_attention.tensors.affine import apply_affine, autocast
from kernel_attention.tensors.padding import first_rows
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import (
    accumulation_dtype,
    exactly,
    running_mean,
    token_ranks,
    without_autocast,
)

_BLOCK = 256  # T
_BLOCKS = 8  # of a slice, which stays in the second-level cache as in ``token_slices``


def causal_primal_layer(
    x: Tensor,
    weights: PrimalWeights,
    samples: Samples,
    grid: Tensor,
    *,
    normalize: bool = True,
    attention_mask: Tensor | None = None,
    running_means: bool = True,
) -> Tensor:
    """The output of the causal data-dependent layer, (B, N, d), up to rounding that of the formulas.

    Args:
        x: (B, N, d).
        weights: the layer's parameters; Lambda is not read.
        samples: the positions of f(X) in x.
        grid: the ranks of these rows, (M',) int64.
        normalize: cosine feature map; False: identity.
        attention_mask: (B, N), True = real token.
        running_means: average queries and keys over the prefix (listing 1).
    """
    rank = token_ranks(x.size(1), attention_mask, x.device)
    x, rows = with_rows(x, samples)
    if running_means:  # an affine map of the mean is the mean of the map
        x = running_mean(x[:, None], attention_mask).squeeze(1)
    x, num_heads = autocast(x), weights.w_e.size(0)
    weight, bias = side_by_side(weights.q_proj, weights.k_proj, num_heads)
    out, constant = weights.out_proj, weights.concat[1]
    if constant is not None:  # O (y + c) + b = O y + (O c + b)
        moved = out[0] @ constant.repeat(num_heads)
        out = out[0], moved if out[1] is None else out[1] + moved
    with without_autocast(x):
        by_head = exactly(rows).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        own = seen_rows.own_rows(rank, by_head, grid, _BLOCK)
        seen = own.rows.transpose(1, 2), *_fold(own, weights, grid.size(0))
        y = _SeenMap.apply(
            x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype),
            *(each.to(x.dtype).contiguous() for each in seen), own.is_later[:, 0],
            Tokens(num_heads, normalize, attention_mask),
        )  # fmt: skip
    return apply_affine(y, out)


def _fold(own: seen_rows.OwnRows, weights: PrimalWeights, num_rows: int) -> tuple[Tensor, Tensor]:
    """W[m] C^T of each block's rows, and the sum of x_m W[m]^T C^T over the rows of the blocks before."""
    concat = exactly(weights.concat[0]).unflatten(1, (2, -1)).permute(1, 2, 0)  # (2, s, p)
    halves = [
        [
            (part @ by_half).transpose(1, 2)
            for part in seen_rows.own_weights(own, first_rows(exactly(w), num_rows))
        ]
        for w, by_half in zip((weights.w_e, weights.w_r), concat, strict=True)
    ]
    maps, before = (torch.stack(parts, dim=1) for parts in zip(*halves, strict=True))
    return maps, before


class _Seen(NamedTuple):
    """What the tokens read.

    Attributes:
        rows: a block's own rows, (B, blocks, h, C, p).
        maps: what the product with each of them adds to the output, for queries and keys,
            (B or 1, 2, blocks, h, C, p).
        before: the map of the rows in the blocks before, (B, 2, blocks, h, p, p).
        is_later: whether a token comes before a row, (B or 1, blocks, T, C) bool.
    """

    rows: Tensor
    maps: Tensor
    before: Tensor
    is_later: Tensor


class _SeenMap(torch.autograd.Function):
    """y (B, N, d) from x, the projections (h * 2 * p, d) of every head's query and key, and ``_Seen``.

    Where the gradient itself is differentiated, it comes from the formulas, which keep z.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, tokens = inputs
        ctx.save_for_backward(*tensors, tokens.mask)
        ctx.options = tokens.num_heads, tokens.normalize
        x, weight, bias, *seen = tensors
        with without_autocast(x):
            return _map_tokens(tokens, x, weight, bias, _Seen(*seen))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, is_later, mask = ctx.saved_tensors
        num_heads, normalize = ctx.options
        tokens, needed = Tokens(num_heads, normalize, mask), ctx.needs_input_grad[: len(tensors)]
        with without_autocast(grad):
            if torch.is_grad_enabled():
                leaves = differentiable_leaves(tensors, needed)
                x, weight, bias, rows, maps, before = leaves
                y = _formulas(tokens, x, weight, bias, _Seen(rows, maps, before, is_later))
                found = differentiable_gradients([y], leaves, needed, [grad])
            else:
                x, weight, bias, rows, maps, before = tensors
                seen = _Seen(rows, maps, before, is_later)
                found = list(_pull_back(tokens, x, weight, bias, seen, grad))
        return (*found, None, None)


def _map_tokens(tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, seen: _Seen) -> Tensor:
    num_heads = tokens.num_heads
    y = x.new_empty(x.size(0), x.size(1), num_heads * seen.before.size(-1))
    rooms = Rooms(x, weight, tokens, 1, _BLOCKS * _BLOCK)
    for piece in _pieces(x, seen.is_later.size(2)):
        mask, z, spare = piece.mask(tokens), rooms.get(0, piece.length), rooms.get(2, piece.length)
        fill_features(piece.of(x), mask, weight, bias, tokens, z, spare)
        rows, maps, before, is_later = piece.read(seen)
        out = None
        for half, phi in enumerate(piece.batches(z.halves, 2)):
            out = torch.bmm(phi, before[half]) if out is None else out.baddbmm_(phi, before[half])
            out.baddbmm_(_products(phi, rows, is_later), maps[half])
        assert out is not None
        piece.by_token(piece.of(y), num_heads).copy_(out.unflatten(0, (-1, num_heads)))
    return y


def _pull_back(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, seen: _Seen, grad_y: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of ``_map_tokens`` by x, weight, bias, rows, maps and before."""
    exact, num_heads = accumulation_dtype(x.dtype), tokens.num_heads
    sums = _Seen._make(torch.zeros_like(each, dtype=exact) for each in seen)  # the mask's is not used
    grad_x, sum_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=exact)
    sum_bias = sum_weight.new_zeros(weight.size(0))
    rooms = Rooms(x, weight, tokens, 1, _BLOCKS * _BLOCK)
    for piece in _pieces(x, seen.is_later.size(2)):
        mask = piece.mask(tokens)
        z, grad_z, spare = (rooms.get(which, piece.length) for which in range(3))
        part, scale = fill_features(piece.of(x), mask, weight, bias, tokens, z, spare)
        rows, maps, before, is_later = piece.read(seen)
        by_rows, by_maps, by_before, _ = piece.read(sums)
        (grad,) = piece.batches(piece.of(grad_y).unflatten(-1, (num_heads, -1)), 1)
        slots = piece.by_token(grad_z.flat, 2 * num_heads)
        for half, phi in enumerate(piece.batches(z.halves, 2)):
            add_product(by_before[half], phi.mT, grad)
            add_product(by_maps[half], _products(phi, rows, is_later).mT, grad)
            slopes = _products(grad, maps[half], is_later)
            add_product(by_rows, slopes.mT, phi)
            by_phi = torch.bmm(grad, before[half].mT).baddbmm_(slopes, rows)
            slots[:, half::2].copy_(by_phi.unflatten(0, (-1, num_heads)))
        features_back(grad_z, z, scale, mask, spare)
        torch.mm(grad_z.flat, weight, out=piece.of(grad_x))
        add_product(sum_weight, grad_z.flat.mT, part)
        add_rows(sum_bias, grad_z.flat)
    by_bias = None if bias is None else sum_bias.to(bias.dtype)
    return grad_x, sum_weight.to(weight.dtype), by_bias, *sums[:3]


def _formulas(tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, seen: _Seen) -> Tensor:
    """``_map_tokens`` by differentiable operations."""
    z = differentiable_features(tokens, x, weight, bias).unflatten(2, (-1, 2))
    z = z.permute(3, 0, 2, 1, 4)  # (2, B, h, N, p)
    rows, maps, before = (each.to(x.dtype).transpose(-4, -3) for each in seen[:3])
    is_later = seen.is_later[:, None]
    parts = [
        seen_rows.block_scores(z[half], rows, is_later, maps[:, half], before[:, half]) for half in range(2)
    ]
    return (parts[0] + parts[1]).transpose(1, 2).flatten(2)


class _Piece(NamedTuple):
    """Some whole blocks of one sequence, or the rest of its last block."""

    sequence: int
    start: int
    length: int
    blocks: slice

    @property
    def block(self) -> int:
        """Tokens of each of its blocks."""
        return self.length // (self.blocks.stop - self.blocks.start)

    def of(self, x: Tensor) -> Tensor:
        """Its tokens of x (B, N, ..): (length, ..)."""
        return x[self.sequence, self.start : self.start + self.length]

    def mask(self, tokens: Tokens) -> Tensor | None:
        """Its part of the mask."""
        return None if tokens.mask is None else self.of(tokens.mask)

    def read(self, seen: _Seen) -> _Seen:
        """What its blocks read, by blocks and heads: (blocks h, ..), with the two halves first."""
        rows, maps, before, is_later = (each[min(self.sequence, each.size(0) - 1)] for each in seen)
        return _Seen(
            rows[self.blocks].flatten(0, 1),
            maps[:, self.blocks].flatten(1, 2),
            before[:, self.blocks].flatten(1, 2),
            is_later[self.blocks, None, : self.block],
        )

    def by_token(self, x: Tensor, parts: int) -> Tensor:
        """A view of x (length, parts w): (blocks, parts, T, w)."""
        return x.view(-1, self.block, parts, x.size(-1) // parts).transpose(1, 2)

    def batches(self, x: Tensor, parts: int) -> list[Tensor]:
        """x (length, h parts, w) as ``parts`` batches of blocks and heads, (blocks h, T, w)."""
        by_block = x.unflatten(0, (-1, self.block)).transpose(1, 2)
        return [by_block[:, part::parts].flatten(0, 1) for part in range(parts)]


def _pieces(x: Tensor, size: int) -> Iterator[_Piece]:
    """All tokens of x (B, N, d) by blocks of ``size``, in pieces of one slice at most."""
    length = x.size(1)
    whole = length // size
    for i in range(x.size(0)):
        for first in range(0, whole, _BLOCKS):
            blocks = slice(first, min(first + _BLOCKS, whole))
            yield _Piece(i, first * size, (blocks.stop - first) * size, blocks)
        if length % size:
            yield _Piece(i, whole * size, length % size, slice(whole, whole + 1))


def _products(left: Tensor, right: Tensor, is_later: Tensor) -> Tensor:
    """left (blocks h, T, p) right^T (blocks h, p, C), and 0 where the token comes before the row."""
    products = torch.bmm(left, right.mT)
    products.unflatten(0, (is_later.size(0), -1)).masked_fill_(is_later, 0.0)
    return products
