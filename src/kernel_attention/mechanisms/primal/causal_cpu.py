"""The causal data-dependent layer over the tokens, forward and backward, in slices that fit the cache.

As in ``seen_rows``, a block of tokens shares the sum over the rows of the blocks before, and meets the few
rows of its own one by one. One map then takes the scores of all heads to the output. The backward pass keeps
what the forward pass had of its last slice, and computes the slices before it again.

How many rows lie in a block is a question about values, so a compiler takes the formulas.

Legend: B batch, N tokens, h heads, p head width, d = h p, s scores, M sampled rows, T tokens of a block, K
blocks of all sequences, C rows of a block at most.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.mechanisms.primal import seen_rows
from kernel_attention.mechanisms.primal.map_operator import (
    Tokens,
    add_product,
    add_rows,
    differentiable_features,
)
from kernel_attention.mechanisms.primal.one_pass import PrimalWeights, side_by_side
from kernel_attention.tensors.affine import autocast
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

_SLICE = 4096  # tokens; shorter slices were slower, because each has some thirty calls


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
    """The output of the causal data-dependent layer on x (B, N, d), up to rounding that of the formulas.

    ``samples`` are the positions of f(X) in x, and ``grid`` the ranks of these rows, (M',) int64.
    ``normalize``: cosine feature map; otherwise identity. Lambda of the weights is not read.
    """
    batch, length, num_heads = x.size(0), x.size(1), weights.w_e.size(0)
    block = seen_rows.block_tokens(length, grid.numel())
    places = seen_rows.own_places(
        token_ranks(length, attention_mask, x.device).squeeze(1), grid, block, accumulation_dtype(x.dtype),
        evenly_spaced=True,
    )  # fmt: skip
    with without_autocast(x):
        w_e, w_r, maps, constant = _after(weights)
        x, *seen = _Own.apply(x, w_e, w_r, samples, places)
    if running_means:  # an affine map of the mean is the mean of the map
        x = running_mean(x[:, None], attention_mask).squeeze(1)
    elif attention_mask is not None:
        x = x.masked_fill(~attention_mask[..., None], 0.0)  # padding may hold any value, also NaN
    missing = -length % block
    x = autocast(pad(x, (0, 0, 0, missing)) if missing else x)
    weight, bias = side_by_side(weights.q_proj, weights.k_proj, num_heads)
    with without_autocast(x):
        shared = (weight, bias, *seen, maps, constant)
        y = _SeenMap.apply(
            x.reshape(batch * (x.size(1) // block), block, x.size(-1)),
            *(None if each is None else each.to(x.dtype) for each in shared),
            places.seen.expand(batch, -1, -1, -1).flatten(0, 1),
            Tokens(num_heads, normalize, None),
        )
    y = y.view(batch, length + missing, y.size(-1))
    return y[:, :length] if missing else y


def _after(weights: PrimalWeights) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The rows' weights for queries and keys, (h, M, s), the map of scores, (o, h * 2 * s), and its constant.

    Where a head has more scores than outputs, the concat map comes before the sums over the rows.
    """
    num_heads, _, rank = weights.w_e.shape
    w_e, w_r, concat, out = (
        exactly(each) for each in (weights.w_e, weights.w_r, weights.concat[0], weights.out_proj[0])
    )
    by_head = out.unflatten(1, (num_heads, -1))  # (o, h, p)
    if rank > concat.size(0):
        w_e, w_r = (w @ half.mT for w, half in zip((w_e, w_r), concat.chunk(2, dim=1), strict=True))
        maps = torch.cat([by_head, by_head], dim=2).flatten(1)
    else:
        maps = (by_head.flatten(0, 1) @ concat).view(out.size(0), -1)
    constant, bias = weights.out_proj[1], weights.concat[1]
    constant = out.new_zeros(out.size(0)) if constant is None else exactly(constant)
    if bias is not None:  # O (y + c) + b = O y + (O c + b)
        constant = torch.addmv(constant, out, exactly(bias).repeat(num_heads))
    return w_e, w_r, maps, constant


class _Own(torch.autograd.Function):
    """x; a block's own rows, (K, h, C, p); their weights, (K, h, 2, C, s); the sums before, (K, h, 2, p, s).

    The rows' gradient is added to that of x in place, as in ``operators.with_rows``.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, w_e: Tensor, w_r: Tensor, samples: Samples, places: seen_rows.RowPlaces
    ) -> tuple[Tensor, ...]:
        tokens = samples.positions.expand(x.size(0), -1)
        tokens = tokens.gather(1, places.which.flatten(1).expand(x.size(0), -1))
        tokens += x.size(1) * torch.arange(x.size(0), device=x.device)[:, None]
        index = places.which.expand(x.size(0), -1, -1).flatten()
        found = _own(x, w_e, w_r, tokens.flatten(), index, places.is_other)
        ctx.save_for_backward(x, w_e, w_r, tokens.flatten(), index, places.is_other, *found[:2])
        return x, *found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, w_e, w_r, tokens, index, is_other, *seen = ctx.saved_tensors
        with without_autocast(x):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[:3]
                leaves = differentiable_leaves((x, w_e, w_r), needed)
                outputs = leaves[0], *_own(leaves[0], leaves[1], leaves[2], tokens, index, is_other)
                return (*differentiable_gradients(outputs, leaves, needed, grads), None, None)
            dx = grads[0].contiguous()
            d_rows, dw = _own_back(*seen, *grads[1:], blocks=is_other.size(1))
            d_rows.masked_fill_(is_other[..., None], 0.0)
            # x goes from here to operators whose gradient of it is a tensor of its own.
            dx.flatten(0, 1).index_add_(0, tokens, d_rows.flatten(0, 2).to(x.dtype))
            d_weight = dw.new_zeros(w_e.size(0), w_e.size(1), *dw.shape[2:])
            d_e, d_r = d_weight.index_add_(1, index, dw).unbind(2)
        return dx, d_e, d_r, None, None


def _own(
    x: Tensor, w_e: Tensor, w_r: Tensor, tokens: Tensor, index: Tensor, is_other: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The results of ``_Own`` but x, where the rows (K C,) are these tokens of the batch."""
    batch, (num_heads, _, rank), (blocks, most) = x.size(0), w_e.shape, is_other.shape[1:]
    rows = exactly(x.flatten(0, 1).index_select(0, tokens)).view(batch, blocks, most, x.size(-1))
    rows = rows.masked_fill(is_other[..., None], 0.0).flatten(0, 1)
    rows = rows.unflatten(-1, (num_heads, -1)).transpose(1, 2).contiguous()
    own = torch.stack([w_e, w_r], dim=2).index_select(1, index)
    own = own.view(num_heads, batch * blocks, most, 2, rank)
    own = own.permute(1, 0, 3, 2, 4).contiguous()
    sums = (rows[:, :, None].mT @ own).unflatten(0, (batch, blocks))
    return rows, own, pad(sums, (0, 0) * 4 + (1, -1)).cumsum(dim=1).flatten(0, 1)


def _own_back(
    rows: Tensor, own: Tensor, d_rows: Tensor, d_own: Tensor, d_before: Tensor, *, blocks: int
) -> tuple[Tensor, Tensor]:
    """The gradients of ``_own`` by the rows, (B, blocks, C, d), and by their weights, (h, K C, 2, s)."""
    d_sum = torch.zeros_like(d_before).unflatten(0, (-1, blocks))
    # a block's sum is part of all sums after it
    d_sum[:, :-1] = d_before.view_as(d_sum)[:, 1:].flip(1).cumsum(1).flip(1)
    d_sum = d_sum.flatten(0, 1)
    d_own = d_own + rows[:, :, None] @ d_sum
    d_rows = d_rows + (own @ d_sum.mT).sum(dim=2)
    d_rows = d_rows.transpose(1, 2).flatten(2).unflatten(0, (-1, blocks))
    return d_rows, d_own.permute(1, 0, 3, 2, 4).flatten(1, 2)


class _Inputs(NamedTuple):
    """The inputs of the pass.

    Attributes:
        x: the tokens by blocks, (K, T, d).
        weight: the projections to every head's query and key, (h * 2 * p, d).
        bias: (h * 2 * p,) or None.
        rows: a block's own rows, (K, h, C, p).
        own: their weights for queries and keys, (K, h, 2, C, s).
        before: the sums over the rows in the blocks before, (K, h, 2, p, s).
        maps: from a token's scores to the output, (o, h * 2 * s).
        constant: (o,).
        seen: which of the rows a token has come to, (K, T, C), as in ``seen_rows.RowPlaces``.
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
        saved = ctx.saved_tensors  # once: activation checkpointing hands them out a single time
        tensors, last = saved[:9], _Slice(*saved[9:])
        num_heads, normalize = ctx.options
        tokens, needed = Tokens(num_heads, normalize, None), ctx.needs_input_grad[:8]
        with without_autocast(grad):
            if torch.is_grad_enabled():
                leaves = differentiable_leaves(tensors[:8], needed)
                y = _formulas(tokens, _Inputs._make([*leaves, tensors[8]]))
                found = differentiable_gradients([y], leaves, needed, [grad])
            else:
                found = list(_pull_back(tokens, _Inputs(*tensors), last, grad.contiguous()))
        return (*found, None, None)


class _Slice(NamedTuple):
    """The state of the pass for n tokens in k blocks.

    Attributes:
        phi: the features, (k, 2 h, T, p).
        scale: what normalised them, (k, 2 h, T, 1), or None.
        products: with the rows that they have seen, (k, 2 h, T, C).
        scores: (n, h * 2 * s).
    """

    phi: Tensor
    scale: Tensor | None
    products: Tensor
    scores: Tensor


def _map_tokens(tokens: Tokens, inputs: _Inputs) -> tuple[Tensor, _Slice]:
    """y, and the last slice."""
    y = inputs.x.new_empty(*inputs.x.shape[:2], inputs.maps.size(0))
    workspace, last = _workspace(inputs), None
    for blocks in _slices(inputs.x):
        last = _read(tokens, inputs, blocks, workspace)
        out = y[blocks].flatten(0, 1)
        torch.mm(last.scores, inputs.maps.mT, out=out)
        out += inputs.constant  # with two threads faster than a product that starts from it
    assert last is not None
    return y, last


def _read(tokens: Tokens, inputs: _Inputs, blocks: slice, workspace: Tensor) -> _Slice:
    """The slice of these blocks."""
    x, heads = inputs.x[blocks], tokens.num_heads
    count, size = x.shape[:2]
    z = torch.mm(x.flatten(0, 1), inputs.weight.mT, out=workspace[: count * size])
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
    scores = _first(workspace, 2 * count * heads, size, inputs.before.size(-1))  # z is done
    torch.bmm(phi.flatten(0, 1), inputs.before[blocks].flatten(0, 2), out=scores)
    scores.baddbmm_(products.flatten(0, 1), inputs.own[blocks].flatten(0, 2))
    scores = scores.unflatten(0, (count, -1)).transpose(1, 2).clone(memory_format=torch.contiguous_format)
    return _Slice(phi, scale, products, scores.view(count * size, -1))


def _pull_back(
    tokens: Tokens, inputs: _Inputs, last: _Slice | None, grad_y: Tensor
) -> tuple[Tensor | None, ...]:
    """The gradients of ``_map_tokens`` by all inputs but ``seen``."""
    x, weight, heads = inputs.x, inputs.weight, tokens.num_heads
    exact = accumulation_dtype(x.dtype)
    d_weight, d_maps = (torch.zeros_like(each, dtype=exact) for each in (weight, inputs.maps))
    d_bias, d_constant = (d_weight.new_zeros(size) for size in (weight.size(0), inputs.maps.size(0)))
    dx, d_rows, d_own, d_before = map(torch.empty_like, (x, inputs.rows, inputs.own, inputs.before))
    workspace = _workspace(inputs)
    for blocks in reversed(_slices(x)):
        part = _read(tokens, inputs, blocks, workspace) if last is None else last
        last, count, size = None, *part.phi.shape[::2]
        grad = grad_y[blocks].flatten(0, 1)
        add_rows(d_constant, grad)
        add_product(d_maps, grad.mT, part.scores)
        d_scores = torch.mm(grad, inputs.maps, out=_first(workspace, count * size, inputs.maps.size(1)))
        d_scores = d_scores.view(count, size, 2 * heads, -1).transpose(1, 2).flatten(0, 1).contiguous()
        torch.bmm(part.phi.flatten(0, 1).mT, d_scores, out=d_before[blocks].flatten(0, 2))
        torch.bmm(part.products.flatten(0, 1).mT, d_scores, out=d_own[blocks].flatten(0, 2))
        slopes = torch.bmm(d_scores, inputs.own[blocks].flatten(0, 2).mT)
        seen_rows.clear_unseen(slopes.view_as(part.products), inputs.seen[blocks, None])
        slopes = slopes.view(count * heads, 2 * size, -1)
        torch.bmm(slopes.mT, part.phi.view(*slopes.shape[:2], -1), out=d_rows[blocks].flatten(0, 1))
        d_phi = torch.bmm(d_scores, inputs.before[blocks].flatten(0, 2).mT)
        d_phi.view(*slopes.shape[:2], -1).baddbmm_(slopes, inputs.rows[blocks].flatten(0, 1))
        d_phi = d_phi.view_as(part.phi)
        dz = workspace[: count * size]
        by_half = dz.view(count, size, 2 * heads, -1).transpose(1, 2)
        if part.scale is None:
            by_half.copy_(d_phi)
        else:  # d(v / |v|) = (dv - u <u, dv>) / |v|, u = v / |v|
            along = torch.mul(part.phi, d_phi, out=_first(workspace, *part.phi.shape)).sum(
                dim=-1, keepdim=True
            )
            torch.mul(d_phi.addcmul_(part.phi, along, value=-1), part.scale, out=by_half)
        torch.mm(dz, weight, out=dx[blocks].flatten(0, 1))
        add_product(d_weight, dz.mT, x[blocks].flatten(0, 1))
        add_rows(d_bias, dz)
    shared = (each.to(x.dtype) for each in (d_weight, d_bias, d_maps, d_constant))
    d_weight, d_bias, d_maps, d_constant = shared
    given_bias = None if inputs.bias is None else d_bias
    return dx, d_weight, given_bias, d_rows, d_own, d_before, d_maps, d_constant


def _slices(x: Tensor) -> list[slice]:
    """The blocks (K, T, d) in slices of ``_SLICE`` tokens at most, but one block at least."""
    step = max(1, _SLICE // x.size(1))
    return [slice(first, min(first + step, x.size(0))) for first in range(0, x.size(0), step)]


def _workspace(inputs: _Inputs) -> Tensor:
    """Memory for the projections of one slice, and for what comes after them or before."""
    blocks = _slices(inputs.x)[0]
    return inputs.x.new_empty((blocks.stop - blocks.start) * inputs.x.size(1), inputs.weight.size(0))


def _first(workspace: Tensor, *sizes: int) -> Tensor:
    """A tensor of these sizes in the first memory of ``workspace``."""
    return workspace.flatten()[: math.prod(sizes)].view(sizes)


def _formulas(tokens: Tokens, inputs: _Inputs) -> Tensor:
    """``_map_tokens`` by differentiable operations."""
    z = differentiable_features(tokens, inputs.x, inputs.weight, inputs.bias)  # (K, T, 2h, p)
    phi = z.transpose(1, 2).unflatten(1, (-1, 2))  # (K, h, 2, T, p)
    products = seen_rows.with_seen(phi @ inputs.rows[:, :, None].mT, inputs.seen[:, None, None])
    scores = phi @ inputs.before + products @ inputs.own
    return scores.flatten(1, 2).transpose(1, 2).flatten(2) @ inputs.maps.mT + inputs.constant
