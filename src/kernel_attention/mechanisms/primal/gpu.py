"""Primal-Attention in few launches, for accelerators, where each costs 5 to 10 us whatever it computes.

The weights are multiplied out once a step: G = W_{.|X} C^T takes a head's features to its output, and
S = W_{.|X} Lambda W_{.|X}^T the features' Gram matrix to the energy. Whatever moves to another layout moves
where it is written anyway. The backward pass is written by hand, with the same economy.

Legend: B batch, b = B where the weights depend on the sequence and else 1, N tokens, h heads, p head width,
d = h p, s rank, M sampled rows. The last dimension of features holds queries' and keys' side by side.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.functional import concat_scores, primal_scores, scores_energy
from kernel_attention.mechanisms.primal.one_pass import PrimalCall, PrimalResult, PrimalWeights
from kernel_attention.tensors.affine import apply_affine, autocast, exact_product
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.sampling import Samples
from kernel_attention.tensors.statistics import exactly, running_mean, without_autocast
from kernel_attention.tensors.unit_rows import unit_rows_back, wide_norms


class Options(NamedTuple):
    """Options of a pass. ``total``: the energy is one sum over the batch."""

    num_heads: int
    feature_map: FeatureMap
    samples: Samples | None
    mask: Tensor | None
    total: bool


class Weights(NamedTuple):
    """The parameters that a pass reads; the biases and ``sqrt_lambda`` may be None."""

    q: Tensor
    k: Tensor
    q_bias: Tensor | None
    k_bias: Tensor | None
    w_e: Tensor
    w_r: Tensor
    sqrt_lambda: Tensor | None
    concat: Tensor
    concat_bias: Tensor | None


def primal_launches(call: PrimalCall, samples: Samples | None) -> PrimalResult:
    """The results of a layer whose sampled rows, if any, are those of the whole sequence."""
    given, x = call.weights, call.x
    assert isinstance(given, PrimalWeights)
    if call.is_causal and call.running_means:  # an affine map of the mean is the mean of the map
        x = running_mean(x[:, None], call.attention_mask).squeeze(1)
    x = autocast(x)
    weights = Weights(
        given.q_proj[0], given.k_proj[0], given.q_proj[1], given.k_proj[1], given.w_e, given.w_r,
        given.sqrt_lambda if call.with_energy else None, *given.concat,
    )  # fmt: skip
    options = Options(call.num_heads, call.feature_map, samples, call.attention_mask, call.total_energy)
    with without_autocast(x):
        found = _Pass.apply(x, options, *weights)
    out, energy = found if call.with_energy else (found, None)
    return PrimalResult(apply_affine(out, given.out_proj), energy, None)


class _Pass(torch.autograd.Function):
    """The heads' outputs side by side, (B, N, d), and the energy where it is wanted.

    Where the gradient itself is differentiated, it comes from the formulas.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, options: Options, *weights: Tensor | None) -> Any:
        ctx.options = options
        out, energy, kept = _forward(x, options, Weights._make(weights))
        ctx.save_for_backward(x, *weights, *kept)
        ctx.set_materialize_grads(False)
        return out if energy is None else (out, energy)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *tensors = ctx.saved_tensors
        weights, kept = tensors[: len(Weights._fields)], tensors[len(Weights._fields) :]
        with without_autocast(x):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]
                leaves = differentiable_leaves((x, *weights), needed)
                outputs = _formula(leaves[0], ctx.options, Weights(*leaves[1:]))[: len(grads)]
                dx, *found = differentiable_gradients(outputs, leaves, needed, grads)
                return dx, None, *found
            grad, d_energy = grads if len(grads) == 2 else (grads[0], None)
            grad = torch.zeros_like(x) if grad is None else grad
            return _backward(x, ctx.options, Weights(*weights), _Kept(*kept), grad, d_energy)


class _Kept(NamedTuple):
    """Tensors that the backward pass needs.

    Attributes:
        joint: the weight of the projections, (2 d, d), in the precision of x.
        unit: features, (h, B, N, p, 2).
        norm: of queries and keys, (B, N, 2, h, 1), where the features are unit rows.
        rows: f(X), (h, M, B, p), or None.
        weight: W_e and W_r side by side, (h, M or p, 2 s).
        read: W_{.|X}, (h, b, p, 2, s).
        concat: C, (p, 2, s).
        maps: G, (h, b, p, 2, p), in the precision of x.
        gram: Z^T Z of each head's features, (h, B, 2 p, 2 p), or None.
        scaled: W_{.|X} Lambda^{1/2}, (h, b, 2, p, s), or None.
        energy: S / h, (h, b, 2, p, p), or None.
    """

    joint: Tensor
    unit: Tensor
    norm: Tensor | None
    rows: Tensor | None
    weight: Tensor
    read: Tensor
    concat: Tensor
    maps: Tensor
    gram: Tensor | None
    scaled: Tensor | None
    energy: Tensor | None


def _forward(x: Tensor, options: Options, weights: Weights) -> tuple[Tensor, Tensor | None, _Kept]:
    (batch, length, width), heads = x.shape, options.num_heads
    size, rank = width // heads, weights.w_e.size(-1)
    parts = [part for part in weights[:4] if part is not None]
    flat = torch.cat([part.flatten() for part in parts]).to(x.dtype)
    joint, bias = flat[: 2 * width**2].view(2 * width, width), flat[2 * width**2 :]
    z = torch.nn.functional.linear(x, joint, bias if len(parts) == 4 else None)
    z = z.unflatten(-1, (2, heads, size))
    unit, norm = x.new_empty(heads, batch, length, size, 2), None
    by_token = unit.permute(1, 2, 4, 0, 3)
    if options.feature_map is cosine:
        norm = wide_norms(z)
        torch.div(z, norm, out=by_token)
    else:
        by_token.copy_(z)
    if options.mask is not None:
        unit.masked_fill_(~options.mask[..., None, None], 0.0)
    rows, count = None, weights.w_e.size(1)
    if options.samples is not None:
        rows = _rows(x, options.samples, heads)
        count = rows.size(1)
    weight = exactly(torch.cat([each[:, :count] for each in (weights.w_e, weights.w_r)], dim=-1))
    read = weight if rows is None else torch.bmm(rows.flatten(2).mT, weight)
    read = read.view(heads, -1, size, 2, rank)
    concat = exactly(weights.concat).unflatten(1, (2, rank))
    maps = read.new_empty(*read.shape[:-1], size)
    torch.bmm(_halves(read), concat.permute(1, 2, 0), out=_halves(maps))
    maps = maps.to(x.dtype)
    features, own = _grouped(unit, read.size(1)), maps.view(-1, 2 * size, size)
    if weights.concat_bias is None:
        mapped = torch.bmm(features, own)
    else:
        mapped = torch.baddbmm(weights.concat_bias.to(x.dtype), features, own)
    out = x.new_empty(batch, length, heads, size)
    out.permute(2, 0, 1, 3).copy_(mapped.view(heads, batch, length, size))
    gram = scaled = inner = energy = None
    if weights.sqrt_lambda is not None:
        own = _grouped(unit, batch)  # rounded products would not sum to a positive matrix
        gram = exact_product(own.mT, own).view(heads, batch, 2 * size, 2 * size)
        scaled = read.new_empty(heads, read.size(1), 2, size, rank)
        torch.mul(read, _by_rank(weights.sqrt_lambda), out=scaled.transpose(2, 3))
        inner = read.new_empty(*scaled.shape[:-1], size)
        factors = scaled.flatten(0, 2)
        inner.flatten(0, 2).baddbmm_(factors, factors.mT, beta=0, alpha=1 / heads)
        product = _own_halves(gram) * inner.permute(0, 1, 3, 4, 2)
        energy = product.sum() if options.total else product.sum(dim=(0, 2, 3, 4))
    return (
        out.flatten(2),
        energy,
        _Kept(joint, unit, norm, rows, weight, read, concat, maps, gram, scaled, inner),
    )


def _rows(x: Tensor, samples: Samples, heads: int) -> Tensor:
    """f(X) by heads, (h, M, B, p), in float32 or better."""
    if samples.positions.dim() == 1:
        by_head = x.unflatten(-1, (heads, -1)).permute(2, 1, 0, 3)
        return exactly(by_head.index_select(1, samples.positions))
    return exactly(samples.read(x)).unflatten(-1, (heads, -1)).permute(2, 1, 0, 3).contiguous()


def _add_rows(dx: Tensor, samples: Samples, d_rows: Tensor) -> None:
    """Add the gradient of f(X), (h, M, B, p), to that of x."""
    if samples.positions.dim() == 1:
        by_head = dx.unflatten(-1, (d_rows.size(0), -1)).permute(2, 1, 0, 3)
        by_head.index_add_(1, samples.positions, d_rows.to(dx.dtype))
    else:
        samples.add_to(dx, d_rows.permute(2, 1, 0, 3).flatten(2))


def _grouped(features: Tensor, groups: int) -> Tensor:
    """(h, B, N, p, 2) -> (h b, B N / b, 2 p)."""
    return features.view(features.size(0) * groups, -1, 2 * features.size(3))


def _halves(x: Tensor) -> Tensor:
    """(h, b, p, 2, n) -> (2, h b p, n), a view."""
    return x.flatten(0, 2).transpose(0, 1)


def _own_halves(gram: Tensor) -> Tensor:
    """Queries' with queries' and keys' with keys': (h, B, 2 p, 2 p) -> (h, B, p, p, 2), a view."""
    return gram.unflatten(2, (-1, 2)).unflatten(4, (-1, 2)).diagonal(dim1=3, dim2=5)


def _by_rank(sqrt_lambda: Tensor) -> Tensor:
    return exactly(sqrt_lambda)[:, None, None, None]


def _backward(
    x: Tensor, options: Options, weights: Weights, kept: _Kept, grad: Tensor, d_energy: Tensor | None
) -> tuple[Tensor | None, ...]:
    (batch, length, width), heads = x.shape, options.num_heads
    read, size, rank = kept.read, kept.read.size(2), kept.read.size(4)
    groups = read.size(1)
    grad = grad.reshape(batch, length, heads, size)
    d_bias = None
    if weights.concat_bias is not None:
        d_bias = grad.reshape(-1, size).sum(dim=0, dtype=weights.concat_bias.dtype)
    # o = u G + c: dG = u^T do, du = do G^T
    slope = grad.permute(2, 0, 1, 3).contiguous().view(heads * groups, -1, size)
    features = _grouped(kept.unit, groups)
    d_maps = exact_product(features.mT, slope).view_as(kept.maps)
    d_unit = torch.bmm(slope, kept.maps.view(-1, 2 * size, size).mT).view_as(kept.unit)
    # G = W C^T in each half: dW = dG C, dC = dG^T W
    concat = kept.concat
    d_read, d_concat = torch.empty_like(read), torch.empty_like(concat)
    torch.bmm(_halves(d_maps), concat.transpose(0, 1), out=_halves(d_read))
    torch.bmm(_halves(d_maps).mT, _halves(read), out=d_concat.transpose(0, 1))
    d_lambda = None
    if d_energy is not None and weights.sqrt_lambda is not None:
        d_lambda = _energy_back(weights.sqrt_lambda, kept, d_energy, d_unit, d_read)
    dz = x.new_empty(batch, length, 2, heads, size)
    if options.mask is not None:
        d_unit.masked_fill_(~options.mask[..., None, None], 0.0)
    d_by_token, by_token = (each.permute(1, 2, 4, 0, 3) for each in (d_unit, kept.unit))
    if kept.norm is None:
        dz.copy_(d_by_token)
    else:
        unit_rows_back(by_token, kept.norm, d_by_token, dz)
    flat = dz.view(-1, 2 * width)
    dx = torch.mm(flat, kept.joint).view_as(x)
    d_joint = torch.mm(flat.mT, x.reshape(-1, width)).to(weights.q.dtype).split(width)
    d_biases: tuple[Tensor | None, ...] = (None, None)
    if weights.q_bias is not None:
        d_biases = flat.sum(dim=0, dtype=weights.q_bias.dtype).split(width)
    d_weights = _weights_back(weights, kept, d_read)
    if kept.rows is not None and options.samples is not None:
        d_rows = torch.bmm(kept.weight, d_read.view(heads, batch * size, 2 * rank).mT)
        _add_rows(dx, options.samples, d_rows.view_as(kept.rows))
    d_concat = d_concat.view_as(weights.concat).to(weights.concat.dtype)
    return dx, None, *d_joint, *d_biases, *d_weights, d_lambda, d_concat, d_bias


def _weights_back(weights: Weights, kept: _Kept, d_read: Tensor) -> list[Tensor]:
    """The gradients of W_e and W_r: of the rows that the sequence has, 0 elsewhere."""
    found = []
    for half, weight in enumerate((weights.w_e, weights.w_r)):
        own = d_read[..., half, :]
        if kept.rows is None:
            found.append(own.squeeze(1).to(weight.dtype).contiguous())
            continue
        count = kept.rows.size(1)
        grad = (torch.zeros_like if count < weight.size(1) else torch.empty_like)(weight, dtype=own.dtype)
        torch.bmm(kept.rows.flatten(2), own.flatten(1, 2), out=grad[:, :count])
        found.append(grad.to(weight.dtype))
    return found


def _energy_back(
    sqrt_lambda: Tensor, kept: _Kept, d_energy: Tensor, d_unit: Tensor, d_read: Tensor
) -> Tensor:
    """Add the energy's part of the gradients of features and W; return that of Lambda^{1/2}."""
    assert kept.gram is not None and kept.energy is not None and kept.scaled is not None  # noqa: PT018
    heads, batch = kept.gram.shape[:2]
    twice = (2 * d_energy).view(1, -1, 1, 1, 1)  # of a symmetric matrix
    # Z^T Z: du = 2 u S in each half
    pull = torch.zeros_like(kept.gram, dtype=d_unit.dtype)
    inner = kept.energy.expand(-1, batch, -1, -1, -1).permute(0, 1, 3, 4, 2)
    torch.mul(inner, twice, out=_own_halves(pull))
    _grouped(d_unit, batch).baddbmm_(_grouped(kept.unit, batch), pull.flatten(0, 1))
    # S = V V^T / h, V = W Lambda^{1/2}: dV = 2 Z^T Z V / h, dW = dV Lambda^{1/2}
    slope = _own_halves(kept.gram) * twice
    if kept.scaled.size(1) < batch:
        slope = slope.sum(dim=1, keepdim=True)
    slope = slope.permute(0, 1, 4, 2, 3).contiguous().flatten(0, 2)
    d_scaled = torch.empty_like(kept.scaled)
    d_scaled.flatten(0, 2).baddbmm_(slope, kept.scaled.flatten(0, 2), beta=0, alpha=1 / heads)
    d_scaled = d_scaled.transpose(2, 3)
    d_read.addcmul_(d_scaled, _by_rank(sqrt_lambda))
    return (d_scaled * kept.read).sum(dim=(1, 2, 3)).to(sqrt_lambda.dtype)


def _formula(x: Tensor, options: Options, weights: Weights) -> tuple[Tensor, Tensor | None]:
    """The results of the pass, from differentiable operations that keep the scores."""
    rows = None if options.samples is None else _by_heads(options.samples.read(x), options.num_heads)
    q, k = (
        _by_heads(apply_affine(x, pair), options.num_heads)
        for pair in ((weights.q, weights.q_bias), (weights.k, weights.k_bias))
    )
    scores = primal_scores(
        q, k, weights.w_e, weights.w_r, rows=rows, feature_map=options.feature_map,
        attention_mask=options.mask,
    )  # fmt: skip
    out = concat_scores(scores, weights.concat, weights.concat_bias).transpose(1, 2).flatten(2)
    if weights.sqrt_lambda is None:
        return out, None
    energy = scores_energy(scores, weights.sqrt_lambda, options.mask)
    return out, energy.sum() if options.total else energy


def _by_heads(x: Tensor, heads: int) -> Tensor:
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)
