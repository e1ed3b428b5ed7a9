"""Primal attention with values in few launches, for accelerators.

The heads' kernel K = W_e Lambda W_r^T / n, (p, p), is multiplied out once a step, and so is the map
T = sum_j v_j phi(k_j)^T K^T of every sequence, so that o_i = T phi(q_i). The objective reads the features'
Gram matrices. The backward pass, with the slope of the objective, is written by hand with the same economy.

The causal form is linear attention with K between the features, whose pass has the same economy.

Legend: B batch, N tokens, h heads, p head width, s rank, n real tokens.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.linear.joint import linear_pass
from kernel_attention.mechanisms.nested_objective.functional import kernel_grams, nested_objective
from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.mechanisms.primal_values.functional import primal_value_attention
from kernel_attention.tensors.affine import exact_product, wide
from kernel_attention.tensors.features.feature_maps import FeatureMap, balancing, cosine, identity
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import (
    accumulation_dtype,
    exactly,
    numbers_to,
    smallest,
    without_autocast,
)
from kernel_attention.tensors.unit_rows import unit_rows, unit_rows_back, wide_norms


def has_value_form(feature_map: FeatureMap) -> bool:
    """True for the feature maps that this form has."""
    return feature_map in (cosine, identity)


class ValueOptions(NamedTuple):
    """Options of a pass: ``normalize`` the heads' outputs to root mean square 1."""

    feature_map: FeatureMap
    mask: Tensor | None
    normalize: bool
    with_objective: bool


class ValueWeights(NamedTuple):
    """W_e and W_r (h, p, s), and the square root of Lambda (h, s)."""

    w_e: Tensor
    w_r: Tensor
    sqrt_lambda: Tensor


def primal_values_launches(
    z: Tensor, w_e: Tensor, w_r: Tensor, sqrt_lambda: Tensor, options: ValueOptions
) -> tuple[Tensor, Tensor | None]:
    """The heads' outputs side by side, (B, N, d), zero at padded tokens, and the nested objective, (B,).

    z are queries, keys and values, (B, N, 3, h, p), the weights (h, p, s), and ``sqrt_lambda`` (h, s). The
    mask of the options is (B, N), True = real token, and the feature map one that ``has_value_form``.
    """
    z = wide(z)
    with without_autocast(z):
        found = _Pass.apply(z, options, w_e, w_r, sqrt_lambda)
    return found if options.with_objective else (found, None)


def causal_values_launches(
    z: Tensor, w_e: Tensor, w_r: Tensor, sqrt_lambda: Tensor, options: ValueOptions
) -> tuple[Tensor, Tensor | None]:
    """The same for a causal layer, without a mask; the objective is that of the whole sequence."""
    weights = ValueWeights(*map(exactly, (w_e, w_r, sqrt_lambda)))
    with without_autocast(z):
        left, right = weights.w_e * weights.sqrt_lambda[:, None].square(), weights.w_r.mT
        out = linear_pass(wide(z), options.feature_map, False, None, True, torch.bmm(left, right))
        if options.normalize:  # a division by the number of keys would change nothing
            out = unit_rows(out) * out.size(-1) ** 0.5
        else:
            out = out / numbers_to(out.size(1), out)[..., None]
        value = _Nested.apply(wide(z.detach()), options, *weights) if options.with_objective else None
    return out.flatten(2), value


class _Nested(torch.autograd.Function):
    """The nested objective, (B,), which has a gradient for the weights alone."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, options: ValueOptions, *weights: Tensor) -> Tensor:
        features = z[:, :, :2]
        if options.feature_map is cosine:
            features = torch.div(features, wide_norms(features), out=torch.empty_like(features))
        features = features.permute(2, 3, 0, 1, 4).contiguous()
        weight, pair = _weights(ValueWeights._make(weights), features.size(2))
        value, found = _objective(features, pair, options.feature_map is not cosine)
        ctx.options = options
        ctx.save_for_backward(z, *weights, weight, pair, *found.values())
        return value

    @staticmethod
    def backward(ctx: Any, d_value: Tensor) -> tuple[Tensor | None, ...]:
        z, w_e, w_r, root, weight, *kept = ctx.saved_tensors
        weights = ValueWeights(w_e, w_r, root)
        if torch.is_grad_enabled():
            needed = ctx.needs_input_grad[2:]
            leaves = differentiable_leaves(weights, needed)
            value = _formula(z, ctx.options, ValueWeights._make(leaves))[1]
            return None, None, *differentiable_gradients([value], leaves, needed, [d_value])
        return None, None, *_weights_back(_objective_back(kept, d_value), weights, weight)


class _Pass(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formulas."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, options: ValueOptions, *weights: Tensor) -> Any:
        ctx.options = options
        out, value, kept = _forward(z, options, ValueWeights._make(weights))
        ctx.save_for_backward(z, *weights, out, *kept)
        ctx.set_materialize_grads(False)
        return out if value is None else (out, value)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        z, w_e, w_r, sqrt_lambda, out, *kept = ctx.saved_tensors
        weights = ValueWeights(w_e, w_r, sqrt_lambda)
        with without_autocast(z):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]
                leaves = differentiable_leaves((z, *weights), needed)
                outputs = _formula(leaves[0], ctx.options, ValueWeights(*leaves[1:]))[: len(grads)]
                dz, *found = differentiable_gradients(outputs, leaves, needed, grads)
                return dz, None, *found
            grad, d_value = grads if len(grads) == 2 else (grads[0], None)
            grad = torch.zeros_like(out) if grad is None else grad
            d_z, *d_weights = _backward(z, ctx.options, weights, out, _Kept(*kept), grad, d_value)
            return d_z, None, *d_weights


class _Kept(NamedTuple):
    """Tensors that the backward pass needs; None where the options leave them out.

    Attributes:
        tokens: phi of queries and keys, and values, (3, h, B, N, p).
        norm: of queries and keys, (B, N, 2, h, 1).
        weight: W_e and W_r, (2, h, b, p, s), with b = B for the objective and else 1.
        pair: the same times Lambda^{1/2}.
        kernel: K, (h, p, p).
        met: sum_j v_j phi(k_j)^T, (h, B p, p).
        maps: T, (h B, p, p), in the precision of the tokens.
        number: n, (B, 1, 1), with a mask.
        size: the heads' outputs' root mean squares, (B, N, h, 1).
        grams: C = phi^T phi of queries and keys, (2, h B, p, p).
        pulled: C W Lambda^{1/2}, (2, h B, p, s).
        inner: Lambda^{1/2} W^T C W Lambda^{1/2}, (2, h B, s, s).
        squared_norm: ||phi_q phi_k^T||^2, (h, B).
    """

    tokens: Tensor
    norm: Tensor | None
    weight: Tensor
    pair: Tensor
    kernel: Tensor
    met: Tensor
    maps: Tensor
    number: Tensor | None
    size: Tensor | None
    grams: Tensor | None = None
    pulled: Tensor | None = None
    inner: Tensor | None = None
    squared_norm: Tensor | None = None


def _forward(z: Tensor, options: ValueOptions, weights: ValueWeights) -> tuple[Tensor, Tensor | None, _Kept]:
    batch, length, _, heads, width = z.shape
    tokens, norm = z.new_empty(3, heads, batch, length, width), None
    by_token = tokens.permute(2, 3, 0, 1, 4)
    if options.feature_map is cosine:
        norm = wide_norms(z[:, :, :2])
        torch.div(z[:, :, :2], norm, out=by_token[:, :, :2])
        by_token[:, :, 2].copy_(z[:, :, 2])
    else:
        by_token.copy_(z)
    if options.mask is not None:
        tokens[:2].masked_fill_(~options.mask[..., None], 0.0)
    phi_q, phi_k, v = tokens.flatten(1, 2).unbind()
    weight, pair = _weights(weights, batch if options.with_objective else 1)
    kernel = weight.new_empty(heads, width, width)
    mean = 1.0 if options.mask is not None else 1 / max(length, 1)
    left, right = _of_all(pair)
    kernel.baddbmm_(left, right.mT, beta=0, alpha=mean)
    met = exact_product(v.mT, phi_k).view(heads, batch * width, width)
    maps, count = torch.bmm(met, kernel.mT), None
    if options.mask is not None:
        count = options.mask.sum(dim=1).clamp_min(1)[:, None, None].to(maps.dtype)
        maps = maps.view(heads, batch, width, width) / count
    maps = maps.to(z.dtype).view(-1, width, width)
    read = torch.bmm(phi_q, maps.mT).view(heads, batch, length, width).permute(1, 2, 0, 3)
    out, size = z.new_empty(batch, length, heads, width), None
    if options.normalize:
        size = wide_norms(read).mul_(width**-0.5)
        torch.div(read, size, out=out)
    else:
        out.copy_(read)
    kept = _Kept(tokens, norm, weight, pair, kernel, met, maps, count, size)
    if not options.with_objective:
        return out.flatten(2), None, kept
    value, found = _objective(tokens[:2], pair, norm is None)
    return out.flatten(2), value, kept._replace(**found)


def _weights(weights: ValueWeights, groups: int) -> tuple[Tensor, Tensor]:
    """W_e and W_r, and the same times Lambda^{1/2}, (2, h, groups, p, s)."""
    both = (exactly(each)[:, None].expand(-1, groups, -1, -1) for each in weights[:2])
    weight = torch.stack(list(both))
    return weight, weight * exactly(weights.sqrt_lambda)[:, None, None]


def _weights_back(d_pair: Tensor, weights: ValueWeights, weight: Tensor) -> list[Tensor]:
    """The gradients of the weights from that of W_e Lambda^{1/2} and W_r Lambda^{1/2}."""
    d_lambda = (d_pair * weight[:, :, 0]).sum(dim=(0, 2))
    found = *(d_pair * exactly(weights.sqrt_lambda)[:, None]).unbind(), d_lambda
    return [each.to(weight.dtype) for each, weight in zip(found, weights, strict=True)]


def _of_all(pair: Tensor) -> tuple[Tensor, Tensor]:
    """W_e Lambda^{1/2} and W_r Lambda^{1/2}, (h, p, s), the same for all sequences."""
    left, right = pair[:, :, 0].unbind()
    return left, right


def _objective(features: Tensor, pair: Tensor, any_size: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """The nested objective, (B,), of features (2, h, B, N, p), and what its gradient needs."""
    heads, batch = features.shape[1:3]
    features = features.flatten(0, 2)
    grams = exact_product(features.mT, features)
    if any_size:  # norms of the kernel are products of four matrices, and large inputs would leave the range
        grams = grams * balancing(grams.abs().amax(dim=(-2, -1), keepdim=True), grams.dtype)
    pulled = torch.bmm(grams, pair.flatten(0, 2))
    inner = torch.bmm(pair.flatten(0, 2).mT, pulled)
    grams, pulled, inner = (each.unflatten(0, (2, -1)) for each in (grams, pulled, inner))
    # tr(F^T F G^T G) - 2 tr(F^T K G) by ||K||^2
    value = torch.baddbmm(_product(pulled), *_rows(inner), beta=-2)
    squared_norm = _product(grams).clamp_min_(smallest(grams.dtype))
    value = (value / squared_norm).view(heads, batch).mean(dim=0)
    found = {"grams": grams, "pulled": pulled, "inner": inner}
    return value, {**found, "squared_norm": squared_norm.view(heads, batch)}


def _rows(pair: Tensor) -> tuple[Tensor, Tensor]:
    """(2, n, ..) -> the first half as rows (n, 1, m) and the second as columns (n, m, 1)."""
    left, right = pair.flatten(2).unbind()
    return left[:, None], right[..., None]


def _product(pair: Tensor) -> Tensor:
    """The inner products of the two halves, (n, 1, 1)."""
    return torch.bmm(*_rows(pair))


def _backward(
    z: Tensor, options: ValueOptions, weights: ValueWeights, out: Tensor, kept: _Kept, grad: Tensor,
    d_value: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    batch, length, _, heads, width = z.shape
    grad, out = (each.reshape(batch, length, heads, width) for each in (grad, out))
    d_read = z.new_empty(heads, batch, length, width)
    by_token = d_read.permute(1, 2, 0, 3)
    if kept.size is None:
        by_token.copy_(grad)
    else:  # o = u / size, size = |u| / sqrt(p): du = (do - o <o, do> / p) / size
        along = (out * grad).sum(dim=-1, keepdim=True, dtype=accumulation_dtype(z.dtype))
        slope = torch.addcmul(grad, out, along.to(z.dtype), value=-1 / width)
        torch.div(slope, kept.size, out=by_token)
    slope, (phi_q, phi_k, v) = d_read.flatten(0, 1), kept.tokens.flatten(1, 2).unbind()
    d_tokens = torch.empty_like(kept.tokens)
    d_q, d_k, d_v = d_tokens.flatten(1, 2).unbind()
    # u = phi_q T^T
    torch.bmm(slope, kept.maps, out=d_q)
    d_maps = exact_product(slope.mT, phi_q).view(heads, batch, width, width)
    d_maps = (d_maps if kept.number is None else d_maps / kept.number).flatten(1, 2)
    # T = M K^T, M = v^T phi_k
    d_met = torch.bmm(d_maps, kept.kernel).to(z.dtype).view(-1, width, width)
    d_kernel = torch.bmm(d_maps.mT, kept.met)
    torch.bmm(phi_k, d_met.mT, out=d_v)
    torch.bmm(v, d_met, out=d_k)
    d_pair = _pair_back(options, kept, length, d_kernel, d_value)
    if options.mask is not None:
        d_tokens[:2].masked_fill_(~options.mask[..., None], 0.0)
    dz, d_by_token = torch.empty_like(z), d_tokens.permute(2, 3, 0, 1, 4)
    if kept.norm is None:
        dz.copy_(d_by_token)
    else:
        features = kept.tokens.permute(2, 3, 0, 1, 4)[:, :, :2]
        unit_rows_back(features, kept.norm, d_by_token[:, :, :2], dz[:, :, :2])
        dz[:, :, 2].copy_(d_by_token[:, :, 2])
    return dz, *_weights_back(d_pair, weights, kept.weight)


def _pair_back(
    options: ValueOptions, kept: _Kept, length: int, d_kernel: Tensor, d_value: Tensor | None
) -> Tensor:
    """The gradient of W_e Lambda^{1/2} and W_r Lambda^{1/2}, (2, h, p, s)."""
    left, right = _of_all(kept.pair)
    if d_value is None or kept.squared_norm is None:
        d_pair, beta = kept.pair.new_empty(2, *left.shape), 0
    else:
        assert kept.grams is not None and kept.pulled is not None and kept.inner is not None  # noqa: PT018
        found = kept.pair, kept.grams, kept.pulled, kept.inner, kept.squared_norm
        d_pair, beta = _objective_back(found, d_value), 1
    # K = F G^T / n
    mean = 1.0 if options.mask is not None else 1 / max(length, 1)
    d_pair[0].baddbmm_(d_kernel, right, beta=beta, alpha=mean)
    d_pair[1].baddbmm_(d_kernel.mT, left, beta=beta, alpha=mean)
    return d_pair


def _objective_back(kept: Sequence[Tensor], d_value: Tensor) -> Tensor:
    """Feature l descends the objective of the first l features: dF = 2 C_q (F triu(G^T C_k G) - C_k G)."""
    pair, grams, pulled, inner, squared_norm = kept
    rows, upper, within = pair.flatten(1, 2), inner.triu(), torch.empty_like(pulled)
    twice = 2 / squared_norm.size(0)
    for own, other in ((0, 1), (1, 0)):
        torch.baddbmm(pulled[other], rows[own], upper[other], beta=-twice, alpha=twice, out=within[own])
    slope = torch.bmm(grams.flatten(0, 1), within.flatten(0, 1)).view_as(pair)
    return (slope * (d_value / squared_norm)[..., None, None]).sum(dim=2)


def _formula(z: Tensor, options: ValueOptions, weights: ValueWeights) -> tuple[Tensor, Tensor | None]:
    """The results of the pass, from differentiable operations that keep the scores."""
    q, k, v = z.permute(2, 0, 3, 1, 4)
    w_e, w_r, root = (each.to(z.dtype) for each in weights)
    phi_q, phi_k = (options.feature_map(each, None, True) for each in (q, k))
    scores = PrimalScores(phi_q @ w_e, phi_k @ (w_r * root[:, None].square()))
    heads = primal_value_attention(scores, v, attention_mask=options.mask)
    if options.mask is not None:
        heads = heads.masked_fill(~options.mask[:, None, :, None], 0.0)
    if options.normalize:
        heads = cosine(heads) * heads.size(-1) ** 0.5
    out = heads.transpose(1, 2).flatten(2)
    if not options.with_objective:
        return out, None
    grams = kernel_grams(
        phi_q, phi_k, feature_map=identity, attention_mask=options.mask, query_mask=options.mask
    )
    return out, nested_objective(grams, *weights)
