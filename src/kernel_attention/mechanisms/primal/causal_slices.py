"""The causal data-dependent layer over the tokens, forward and backward, in slices that fit the cache.

As in ``seen_rows``, a block of tokens shares the sum over the rows of the blocks before, and meets the few
rows of its own one by one. One map then takes the scores of all heads to the output. The backward pass keeps
what the forward pass had of its last slice, and computes the slices before it again.

How many rows lie in a block is a question about values, so a compiler takes the formulas.

Legend: B batch, N tokens, h heads, p head width, d = h p, s scores, M sampled rows, T tokens of a block, K
blocks of all sequences, C rows of a block at most.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.mechanisms.primal.fused import PrimalWeights, side_by_side
from kernel_attention.mechanisms.primal.operators import differentiable_features, with_rows
from kernel_attention.mechanisms.primal.token_slices import (
    Tokens,
    add_product,
    add_rows,
)
from kernel_attention.tensors.affine import autocast
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
from kernel_attention.tensors.unit_rows import inverse_norms

_SLICE = 2048  # tokens, as in ``token_slices``


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
    batch, length, num_heads = x.size(0), x.size(1), weights.w_e.size(0)
    block = _block(length, grid.numel())
    rank = token_ranks(length, attention_mask, x.device)
    x, rows = with_rows(x, samples)
    if running_means:  # an affine map of the mean is the mean of the map
        x = running_mean(x[:, None], attention_mask).squeeze(1)
    elif attention_mask is not None:
        x = x.masked_fill(~attention_mask[..., None], 0.0)  # padding may hold any value, also NaN
    missing = -length % block
    x = autocast(pad(x, (0, 0, 0, missing)) if missing else x)
    weight, bias = side_by_side(weights.q_proj, weights.k_proj, num_heads)
    with without_autocast(x):
        by_head = exactly(rows).unflatten(-1, (num_heads, -1)).transpose(1, 2)
        own = seen_rows.own_rows(rank, by_head, grid, block)
        w, maps, constant = _after(weights, grid.numel())
        own_w, before = (_by_half(each, batch) for each in seen_rows.own_weights(own, w))
        seen = own.seen.squeeze(1).expand(batch, -1, -1, -1).flatten(0, 1)
        y = _SeenMap.apply(
            x.reshape(-1, block, x.size(-1)), weight.to(x.dtype), None if bias is None else bias.to(x.dtype),
            *(each.to(x.dtype) for each in (_by_block(own.rows), own_w, before, maps, constant)),
            seen, Tokens(num_heads, normalize, None),
        )  # fmt: skip
    y = y.view(batch, -1, y.size(-1))
    return y[:, :length] if missing else y


def _block(length: int, num_rows: int) -> int:
    """Tokens of a block, a power of two.

    A token meets the rows of half its block. A block costs a sum of p s numbers. The factor was measured.
    """
    return 2 ** max(5, min(9, round(math.log2(_TOKENS * (length / max(num_rows, 1)) ** 0.5))))


_TOKENS = 32


def _after(weights: PrimalWeights, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the sampled rows (h, M', 2 s), and the map of a token's scores (2 h s, d) with its constant.

    Where a head has more scores than outputs, the concat map comes before the sums over the rows.
    """
    num_heads, _, rank = weights.w_e.shape
    w = torch.cat([exactly(weights.w_e), exactly(weights.w_r)], dim=-1)
    concat, bias = (None if each is None else exactly(each) for each in weights.concat)
    out, constant = (None if each is None else exactly(each) for each in weights.out_proj)
    assert concat is not None and out is not None
    by_head = out.mT.unflatten(0, (num_heads, -1))  # (h, p, d)
    if rank > concat.size(0):
        halves = zip(w.chunk(2, dim=-1), concat.chunk(2, dim=-1), strict=True)
        w = torch.cat([half @ part.mT for half, part in halves], dim=-1)
        maps = torch.cat([by_head, by_head], dim=1)
    else:
        maps = concat.mT @ by_head
    if bias is not None:  # O (y + c) + b = O y + (O c + b)
        moved = out @ bias.repeat(num_heads)
        constant = moved if constant is None else moved + constant
    return first_rows(w, num_rows), maps.flatten(0, 1), out.new_zeros(out.size(0)) if constant is None else constant


def _by_block(x: Tensor) -> Tensor:
    """(B, h, blocks, ..) -> (K, h, ..)."""
    return x.transpose(1, 2).flatten(0, 1)


def _by_half(x: Tensor, batch: int) -> Tensor:
    """(B or 1, h, blocks, m, 2 s) -> (K, h, 2, m, s)."""
    return _by_block(x.expand(batch, -1, -1, -1, -1)).unflatten(-1, (2, -1)).transpose(2, 3).contiguous()


class _Inputs(NamedTuple):
    """What the pass reads.

    Attributes:
        x: the tokens by blocks, (K, T, d).
        weight: the projections to every head's query and key, (h * 2 * p, d).
        bias: (h * 2 * p,) or None.
        rows: a block's own rows, (K, h, C, p).
        own: their weights for queries and keys, (K, h, 2, C, s).
        before: the sums over the rows in the blocks before, (K, h, 2, p, s).
        maps: from a token's scores to the output, (h * 2 * s, o).
        constant: (o,).
        seen: which of the rows a token has come to, (K, T, C), as in ``seen_rows.OwnRows``.
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    rows: Tensor
    own: Tensor
    before: Tensor
    maps: Tensor
    constant: Tensor
    seen: Tensor


class _SeenMap(torch.autograd.Function):
    """y (K, T, o) from ``_Inputs`` and ``Tokens``.

    Where the gradient itself is differentiated, it comes from the formulas, which keep z.
    """

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, tokens = inputs
        ctx.options = tokens.num_heads, tokens.normalize
        with without_autocast(tensors[0]):
            y, last = _map_tokens(tokens, _Inputs(*tensors))
        ctx.save_for_backward(*tensors, *last)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        tensors, last = ctx.saved_tensors[:9], _Slice(*ctx.saved_tensors[9:])
        tokens, needed = Tokens(*ctx.options, None), ctx.needs_input_grad[:8]
        with without_autocast(grad):
            if torch.is_grad_enabled():
                leaves = differentiable_leaves(tensors[:8], needed)
                y = _formulas(tokens, _Inputs(*leaves, tensors[8]))
                found = differentiable_gradients([y], leaves, needed, [grad])
            else:
                found = list(_pull_back(tokens, _Inputs(*tensors), last, grad.contiguous()))
        return (*found, None, None)


class _Slice(NamedTuple):
    """What the pass has of n tokens in k blocks.

    Attributes:
        phi: the features, (k, 2 h, T, p).
        scale: what normalised them, as ``inverse_norms`` gives it, (n, 2 h, 1), or None.
        products: with the rows that they have seen, (k, 2 h, T, C).
        scores: (n, h * 2 * s).
    """

    phi: Tensor
    scale: Tensor | None
    products: Tensor
    scores: Tensor


def _map_tokens(tokens: Tokens, inputs: _Inputs) -> tuple[Tensor, _Slice]:
    """y, and the last slice."""
    y = inputs.x.new_empty(*inputs.x.shape[:2], inputs.maps.size(1))
    room, last = _room(inputs), None
    for blocks in _slices(inputs.x):
        last = _read(tokens, inputs, blocks, room)
        out = y[blocks].flatten(0, 1)
        torch.mm(last.scores, inputs.maps, out=out)
        out += inputs.constant  # with two threads faster than a product that starts from it
    assert last is not None
    return y, last


def _read(tokens: Tokens, inputs: _Inputs, blocks: slice, room: Tensor) -> _Slice:
    """The slice of these blocks."""
    x, heads = inputs.x[blocks], tokens.num_heads
    count, size = x.shape[:2]
    z = torch.mm(x.flatten(0, 1), inputs.weight.mT, out=room[: count * size])
    if inputs.bias is not None:
        z += inputs.bias
    by_token = z.view(count, size, 2 * heads, -1)
    by_half = by_token.transpose(1, 2)
    phi, scale = x.new_empty(by_half.shape), None
    if tokens.normalize:
        scale = inverse_norms(by_token).transpose(1, 2)
        torch.mul(by_half, scale, out=phi)
    else:
        phi.copy_(by_half)
    products = torch.bmm(phi.view(count * heads, 2 * size, -1), inputs.rows[blocks].flatten(0, 1).mT)
    products = products.view(count, 2 * heads, size, -1)
    seen_rows.clear_unseen(products, inputs.seen[blocks, None])
    scores = torch.bmm(phi.flatten(0, 1), inputs.before[blocks].flatten(0, 2))
    scores.baddbmm_(products.flatten(0, 1), inputs.own[blocks].flatten(0, 2))
    scores = scores.unflatten(0, (count, -1)).transpose(1, 2).reshape(count * size, -1)
    return _Slice(phi, scale, products, scores)


def _pull_back(
    tokens: Tokens, inputs: _Inputs, last: _Slice | None, grad_y: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of ``_map_tokens`` by all inputs but ``seen``."""
    x, weight, heads = inputs.x, inputs.weight, tokens.num_heads
    exact = accumulation_dtype(x.dtype)
    by_weight, by_maps = (torch.zeros_like(each, dtype=exact) for each in (weight, inputs.maps))
    by_bias, by_constant = (by_weight.new_zeros(size) for size in (weight.size(0), inputs.maps.size(1)))
    by_x, by_rows, by_own, by_before = map(
        torch.empty_like, (x, inputs.rows, inputs.own, inputs.before)
    )
    room = _room(inputs)
    for blocks in reversed(_slices(x)):
        part = _read(tokens, inputs, blocks, room) if last is None else last
        last, count, size = None, *part.phi.shape[::2]
        grad = grad_y[blocks].flatten(0, 1)
        add_rows(by_constant, grad)
        add_product(by_maps, part.scores.mT, grad)
        by_scores = (grad @ inputs.maps.mT).view(count, size, 2 * heads, -1).transpose(1, 2).flatten(0, 1)
        torch.bmm(part.phi.flatten(0, 1).mT, by_scores, out=by_before[blocks].flatten(0, 2))
        torch.bmm(part.products.flatten(0, 1).mT, by_scores, out=by_own[blocks].flatten(0, 2))
        slopes = torch.bmm(by_scores, inputs.own[blocks].flatten(0, 2).mT)
        seen_rows.clear_unseen(slopes.view_as(part.products), inputs.seen[blocks, None])
        slopes = slopes.view(count * heads, 2 * size, -1)
        torch.bmm(slopes.mT, part.phi.view(*slopes.shape[:2], -1), out=by_rows[blocks].flatten(0, 1))
        by_phi = torch.bmm(by_scores, inputs.before[blocks].flatten(0, 2).mT)
        by_phi.view(*slopes.shape[:2], -1).baddbmm_(slopes, inputs.rows[blocks].flatten(0, 1))
        by_phi = by_phi.view_as(part.phi)
        by_z = room[: count * size]
        by_half = by_z.view(count, size, 2 * heads, -1).transpose(1, 2)
        if part.scale is None:
            by_half.copy_(by_phi)
        else:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
            along = (part.phi * by_phi).sum(dim=-1, keepdim=True)
            torch.mul(by_phi.addcmul_(part.phi, along, value=-1), part.scale, out=by_half)
        torch.mm(by_z, weight, out=by_x[blocks].flatten(0, 1))
        add_product(by_weight, by_z.mT, x[blocks].flatten(0, 1))
        add_rows(by_bias, by_z)
    shared = (by_weight, by_bias if inputs.bias is not None else None, by_maps, by_constant)
    by_weight, by_bias, by_maps, by_constant = (None if each is None else each.to(x.dtype) for each in shared)
    return by_x, by_weight, by_bias, by_rows, by_own, by_before, by_maps, by_constant


def _slices(x: Tensor) -> list[slice]:
    """The blocks (K, T, d) in slices of ``_SLICE`` tokens at most, but one block at least."""
    step = max(1, _SLICE // x.size(1))
    return [slice(first, min(first + step, x.size(0))) for first in range(0, x.size(0), step)]


def _room(inputs: _Inputs) -> Tensor:
    """Memory for the projections of one slice."""
    blocks = _slices(inputs.x)[0]
    return inputs.x.new_empty((blocks.stop - blocks.start) * inputs.x.size(1), inputs.weight.size(0))


def _formulas(tokens: Tokens, inputs: _Inputs) -> Tensor:
    """``_map_tokens`` by differentiable operations."""
    z = differentiable_features(tokens, inputs.x, inputs.weight, inputs.bias)  # (K, T, 2h, p)
    phi = z.transpose(1, 2).unflatten(1, (-1, 2))  # (K, h, 2, T, p)
    products = seen_rows.with_seen(phi @ inputs.rows[:, :, None].mT, inputs.seen[:, None, None])
    scores = phi @ inputs.before + products @ inputs.own
    return scores.flatten(1, 2).transpose(1, 2).flatten(2) @ inputs.maps + inputs.constant
