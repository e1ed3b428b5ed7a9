"""Linear attention in few launches and few passes over the memory.

On an accelerator each launch costs 5 to 10 us whatever it computes; on a CPU a training step takes a fifth
less time. Queries and keys take their features together. What moves to the heads' layout moves where it is
written anyway, and the sums of the weights are one more column of the values' products. The backward pass is
written by hand, with the same economy.

Legend: B batch, N tokens, h heads, p head width, H = B h, c tokens of a chunk, n chunks, e = p columns of the
values, and one more where the weights are summed.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.tensors.affine import wide
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, elu, identity, relu
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import accumulation_dtype, smallest, without_autocast
from kernel_attention.tensors.unit_rows import unit_rows_back, wide_norms


class LinearOptions(NamedTuple):
    """The options of a pass; ``chunk`` tokens together where it is causal, 0 where it is not."""

    feature_map: FeatureMap
    normalize: bool
    chunk: int


def has_linear_pass(feature_map: FeatureMap) -> bool:
    """True for the feature maps that a pass has."""
    return feature_map in (cosine, elu, identity, relu)


def linear_pass(
    z: Tensor, feature_map: FeatureMap, normalize: bool, attention_mask: Tensor | None, is_causal: bool,
    between: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """``linear_attention`` of queries, keys and values z (B, N, 3, h, p) with a map that ``has_linear_pass``:
    (B, N, h, p).

    ``normalize``: whether the sums of the weights divide. ``attention_mask`` is (B, N), True = real token;
    None where causal. ``between`` is a map K of every head, (h, p, p), for weights phi(q)^T K phi(k).
    """
    dtype, z = z.dtype, wide(z)
    chunk = min(max(128, z.size(-1)), z.size(1)) if is_causal else 0
    options = LinearOptions(feature_map, normalize, chunk)
    with without_autocast(z):
        return _LinearPass.apply(z, attention_mask, options, between).to(dtype)


class _LinearPass(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formulas."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, mask: Tensor | None, options: LinearOptions, between: Tensor | None
    ) -> Tensor:
        ctx.options = options
        out, kept = _forward(z, mask, options, between)
        ctx.save_for_backward(z, mask, between, out, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        z, mask, between, out, *kept = ctx.saved_tensors
        with without_autocast(z):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[0], ctx.needs_input_grad[3]
                leaves = differentiable_leaves((z, between), needed)
                y = _formula(leaves[0], mask, ctx.options, leaves[1])
                dz, d_between = differentiable_gradients([y], leaves, needed, [grad])
            else:
                dz, d_between = _backward(z, mask, out, _Kept(*kept), grad, ctx.options)
            return dz, None, None, d_between


class _Kept(NamedTuple):
    """Tensors of the backward pass, in the heads' layout; M = n c is N or the next multiple of the chunk.

    Attributes:
        phi: features of queries and keys, (2, B, h, M, p).
        values: (B, h, M, e).
        state: sum_j phi(k_j) v_j^T, (H, p, e); the sums before each chunk, (H n, p, e), where causal.
        weights: sums of the weights, (B, h, N, 1), infinite where they are 0.
        norm: of queries and keys, (B, N, 2, h, 1), where the features are unit rows.
        between: K of every sequence, (H, p, p); None without.
    """

    phi: Tensor
    values: Tensor
    state: Tensor
    weights: Tensor | None
    norm: Tensor | None
    between: Tensor | None


def _forward(
    z: Tensor, mask: Tensor | None, options: LinearOptions, between: Tensor | None
) -> tuple[Tensor, _Kept]:
    batch, length, _, heads, width = z.shape
    chunk, columns = options.chunk, width + options.normalize
    missing = -length % chunk if chunk else 0
    make = z.new_zeros if missing else z.new_empty
    phi = make(2, batch, heads, length + missing, width)
    norm = _fill_features(z[:, :, :2], phi[..., :length, :].permute(1, 3, 0, 2, 4), options.feature_map)
    if mask is not None:
        phi[1].masked_fill_(~mask[:, None, :, None], 0.0)
    q, k = phi.flatten(1, 2)
    if between is not None:
        between = between.to(z.dtype).expand(batch, -1, -1, -1).flatten(0, 1)
        q = torch.bmm(q, between)
    values = z[:, :, 2].transpose(1, 2)
    if columns > width or missing:  # padded keys are zero, whatever their values
        values = pad(values, (0, columns - width, 0, missing), value=1.0)
    values = values.contiguous()
    if chunk:
        found, state = _causal(q, k, values.flatten(0, 1), chunk)
    else:
        state = torch.bmm(k.mT, values.flatten(0, 1))
        found = torch.bmm(q, state)
    found = found.view(batch, heads, length + missing, columns)[:, :, :length]
    out, weights = z.new_empty(batch, length, heads, width), None
    if options.normalize:
        weights = torch.threshold(found[..., width:], smallest(z.dtype), math.inf)
        torch.div(found[..., :width], weights, out=out.transpose(1, 2))
    else:
        out.transpose(1, 2).copy_(found)
    return out, _Kept(phi, values, state, weights, norm, between)


def _causal(q: Tensor, k: Tensor, v: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """sum_{j <= i} (q_i . k_j) v_j, (H, M, e), and the sums of k_j v_j^T before each chunk, (H n, p, e)."""
    q, k, v = (each.unflatten(1, (-1, chunk)) for each in (q, k, v))
    states = torch.bmm(k.flatten(0, 1).mT, v.flatten(0, 1)).unflatten(0, k.shape[:2])
    exact = accumulation_dtype(states.dtype)
    before = pad(states[:, :-1].cumsum(dim=1, dtype=exact).to(states.dtype), (0, 0, 0, 0, 1, 0)).flatten(0, 1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    found = torch.bmm(torch.bmm(q, k.mT).tril_(), v).baddbmm_(q, before)
    return found.view(-1, states.size(1) * chunk, v.size(-1)), before


def _backward(
    z: Tensor, mask: Tensor | None, out: Tensor, kept: _Kept, grad: Tensor, options: LinearOptions
) -> tuple[Tensor, Tensor | None]:
    batch, length, _, heads, width = z.shape
    columns, padded = kept.state.size(-1), kept.phi.size(-2)
    make = z.new_zeros if padded > length else z.new_empty
    slope = make(batch, heads, padded, columns)
    real, grad = slope[:, :, :length], grad.transpose(1, 2)
    if kept.weights is None:
        real.copy_(grad)
    else:  # o = a / w: da = do / w, dw = -<da, o>
        torch.div(grad, kept.weights, out=real[..., :width])
        product = real[..., :width] * out.transpose(1, 2)
        torch.sum(product, dim=-1, out=real[..., width])
        real[..., width].neg_()
    q, k = kept.phi.flatten(1, 2)
    d_phi, values, slope = torch.empty_like(kept.phi), kept.values.flatten(0, 1), slope.flatten(0, 1)
    dq, dk = d_phi.flatten(1, 2)
    phi_q, d_phi_q, d_between = q, dq, None
    if kept.between is not None:
        q, dq = torch.bmm(q, kept.between), torch.empty_like(q)
    if options.chunk:
        dv = _causal_back(q, k, values, kept.state, slope, options.chunk, dq, dk)
    else:
        torch.bmm(slope, kept.state.mT, out=dq)
        d_state = torch.bmm(q.mT, slope)
        torch.bmm(values, d_state.mT, out=dk)
        dv = torch.bmm(k, d_state)
    if kept.between is not None:
        torch.bmm(dq, kept.between.mT, out=d_phi_q)
        d_between = (
            torch.bmm(phi_q.mT, dq).unflatten(0, (batch, heads)).sum(dim=0, dtype=accumulation_dtype(q.dtype))
        )
    dz = torch.empty_like(z)
    if mask is not None and options.feature_map in (cosine, identity):
        dk.view_as(d_phi[1]).masked_fill_(~mask[:, None, :, None], 0.0)
    _pull_features(kept, d_phi, dz[:, :, :2], options.feature_map)
    dz[:, :, 2].transpose(1, 2).copy_(dv.view(batch, heads, padded, -1)[:, :, :length, :width])
    return dz, d_between


def _causal_back(
    q: Tensor, k: Tensor, v: Tensor, before: Tensor, slope: Tensor, chunk: int, dq: Tensor, dk: Tensor
) -> Tensor:
    """Fill the gradients of q and k, (H, M, p), and return that of v, (H, M, e)."""
    sequences = q.size(0)
    q, k, v, slope, dq, dk = (
        each.unflatten(1, (-1, chunk)).flatten(0, 1) for each in (q, k, v, slope, dq, dk)
    )
    weights, d_weights = torch.bmm(q, k.mT).tril_(), torch.bmm(slope, v.mT).tril_()
    # a chunk's state is part of the sums before all later chunks
    d_before = torch.bmm(q.mT, slope).unflatten(0, (sequences, -1))
    exact = accumulation_dtype(d_before.dtype)
    d_state = d_before[:, 1:].flip(1).cumsum(dim=1, dtype=exact).flip(1).to(d_before.dtype)
    d_state = pad(d_state, (0, 0, 0, 0, 0, 1)).flatten(0, 1)
    # dq = dw k + do S^T, dk = dw^T q + v dS^T, dv = w^T do + k dS
    torch.baddbmm(torch.bmm(d_weights, k), slope, before.mT, out=dq)
    torch.baddbmm(torch.bmm(d_weights.mT, q), v, d_state.mT, out=dk)
    return torch.bmm(weights.mT, slope).baddbmm_(k, d_state).view(sequences, -1, v.size(-1))


def _fill_features(z: Tensor, out: Tensor, feature_map: FeatureMap) -> Tensor | None:
    """phi(z) (B, N, 2, h, p), written to ``out``; the norms where the features are unit rows."""
    if feature_map is elu:
        torch.add(z.clamp_max(0.0).exp_(), z.relu(), out=out)
    elif feature_map is relu:
        torch.clamp_min(z, 0.0, out=out)
    elif feature_map is identity:
        out.copy_(z)
    else:
        norm = wide_norms(z)
        torch.div(z, norm, out=out)
        return norm
    return None


def _pull_features(kept: _Kept, grad: Tensor, out: Tensor, feature_map: FeatureMap) -> None:
    """The gradient of z from that of phi, (2, B, h, M, p), written to ``out`` (B, N, 2, h, p)."""
    phi, grad = (each[..., : out.size(1), :].permute(1, 3, 0, 2, 4) for each in (kept.phi, grad))
    if feature_map is elu:  # 1 where z > 0, exp(z) elsewhere, and 0 where phi is padding's
        torch.mul(grad, phi.clamp_max(1.0), out=out)
    elif feature_map is relu:
        torch.mul(grad, phi.sign(), out=out)
    elif kept.norm is None:
        out.copy_(grad)
    else:
        unit_rows_back(phi, kept.norm, grad, out)


def _formula(z: Tensor, mask: Tensor | None, options: LinearOptions, between: Tensor | None) -> Tensor:
    q, k, v = z.permute(2, 0, 3, 1, 4)
    feature_map = options.feature_map
    if between is not None:
        q, k, feature_map = feature_map(q, None, True) @ between, feature_map(k, None, True), identity
    return linear_attention(
        q, k, v, feature_map=feature_map, normalize=options.normalize, attention_mask=mask,
        is_causal=options.chunk > 0,
    ).transpose(1, 2)  # fmt: skip
