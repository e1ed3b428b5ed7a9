"""Multilinear attention in few launches, for accelerators, where each costs 5 to 10 us whatever it computes.

All modes come from one product and are normalised together. Factors and concat map are multiplied out to the
maps V_n, so that a head's output is one product too, and the Gram matrices of all modes are another. The
backward pass of the objective is written by hand.

Legend: B batch, N tokens, h heads, D modes, p head width, R rank.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.multilinear.objective import objective_of_grams
from kernel_attention.tensors.affine import Affine, exact_product
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, frobenius, identity
from kernel_attention.tensors.multilinear.unfoldings import by_solving
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import exactly, without_autocast
from kernel_attention.tensors.unit_rows import unit_by_head


def has_joint_modes(feature_map: FeatureMap) -> bool:
    """True for the feature maps that this form has."""
    return feature_map in (cosine, frobenius, identity)


def multilinear_launches(
    z: Tensor,
    factors: Tensor,
    concat: Affine,
    *,
    feature_map: FeatureMap,
    attention_mask: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """The heads' outputs side by side, (B, N, d), and the modes' features, (h, B, N, D p); not causal.

    Args:
        z: queries, keys and fibers, (B, N, D, h, p).
        factors: from ``multilinear_factors``, (D, h, p, R).
        concat: W_c (p, D R) and its bias, shared by the heads.
        feature_map: phi, one that ``has_joint_modes``.
        attention_mask: (B, N), True = real token.
    """
    batch, length, order, heads, size = z.shape
    if attention_mask is not None:
        z = z.masked_fill(~attention_mask[..., None, None, None], 0.0)
    with without_autocast(z):
        dims: tuple[int, ...] | None = None
        if feature_map in (cosine, frobenius):
            dims = (4,) if feature_map is cosine else (1, 4)
        features = unit_by_head(z, dims)  # (h, B, N, D, p)
        weight = exactly(concat[0]).unflatten(1, (order, -1)).permute(1, 2, 0)  # (D, R, p)
        maps = torch.bmm(factors.flatten(1, 2), weight).unflatten(1, (heads, size)).transpose(0, 1)
        flat = features.flatten(3), maps.reshape(heads, order * size, size).to(z.dtype)
        rows = flat[0].flatten(1, 2)
        out = (
            torch.bmm(rows, flat[1])
            if concat[1] is None
            else torch.baddbmm(concat[1].to(z.dtype), rows, flat[1])
        )
        out = out.view(heads, batch, length, size).permute(1, 2, 0, 3).flatten(2)
        return out, flat[0]


def mode_grams(features: Tensor, order: int) -> Tensor:
    """The Gram matrices of each mode, (D, B, h, p, p), a view, of features (h, B, N, D p)."""
    rows, width = features.flatten(0, 1), features.size(-1) // order
    grams = exact_product(rows.mT, rows).view(*features.shape[:2], order, width, order, width)
    return grams.diagonal(dim1=2, dim2=4).permute(4, 1, 0, 2, 3)


def joint_factors(weights: Tensor, core: Tensor) -> tuple[Tensor, Tensor]:
    """``multilinear_factors`` of modes of one size, (D, h, p, R), and the core unfolded in every mode.

    The unfoldings are (D, h, R, R^(D - 1)), with the modes in their order round from n; ``weights`` are
    (D, h, p, R), ``core`` (h, R, .., R).
    """
    with without_autocast(core):
        return _Factors.apply(exactly(weights), exactly(core))


class _Factors(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formula."""

    @staticmethod
    def forward(ctx: Any, weights: Tensor, core: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        factors, unfolded, around, rows = _factors(weights, core)
        ctx.save_for_backward(weights, core, unfolded, around, rows)
        return factors, unfolded

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        weights, core, unfolded, around, rows = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((weights, core), ctx.needs_input_grad)
            found = _factors(leaves[0], leaves[1])[:2]
            return tuple(differentiable_gradients(found, leaves, ctx.needs_input_grad, grads))
        slope, d_unfolded = grads
        if slope is None:
            slope = torch.zeros_like(weights)
        # sum_a S(w_1a, .., w_Da) is linear in every mode, and the factors are its slopes. So the gradient of
        # the weights is the change of the factors along that of the factors.
        change = _row_products(around, torch.cat([slope, slope[:-1]]))
        d_weights = torch.bmm(change.flatten(0, 1), unfolded.flatten(0, 1).mT).view_as(weights)
        turned = slope.flatten(0, 1).mT, rows.flatten(0, 1)
        if d_unfolded is None:
            turned_back = torch.bmm(*turned)
        else:
            turned_back = torch.baddbmm(d_unfolded.flatten(0, 1), *turned)
        parts = turned_back.view(weights.size(0), *core.shape).unbind()
        return d_weights, functools.reduce(torch.add, [_turned(part, -n) for n, part in enumerate(parts)])


def _factors(weights: Tensor, core: Tensor) -> tuple[Tensor, ...]:
    """Factors, unfoldings, and the weights of modes 1..D, 1..D - 1 with their row-wise products."""
    order = weights.size(0)
    unfolded = torch.stack([_turned(core, n) for n in range(order)]).flatten(3)
    around = torch.cat([weights, weights[:-1]])
    rows = _row_products(around)
    factors = torch.bmm(rows.flatten(0, 1), unfolded.flatten(0, 1).mT).view_as(weights)
    return factors, unfolded, around, rows


def _turned(core: Tensor, n: int) -> Tensor:
    """(h, R_1 .. R_D) with mode 1 + n first, and the others in their order round."""
    order = core.dim() - 1
    return core.permute(0, *(1 + (n + m) % order for m in range(order)))


def _row_products(around: Tensor, slope: Tensor | None = None) -> Tensor:
    """Row a of all other modes' weights multiplied out, (D, h, p, R^(D - 1)); its change with ``slope``."""
    order = (around.size(0) + 1) // 2
    rows, change = around[1 : order + 1], None if slope is None else slope[1 : order + 1]
    for m in range(2, order):
        other = around[m : order + m, ..., None, :]
        if slope is not None and change is not None:
            along = slope[m : order + m, ..., None, :]
            change = torch.addcmul(change[..., None] * other, rows[..., None], along).flatten(-2)
        if slope is None or m < order - 1:
            rows = (rows[..., None] * other).flatten(-2)
    return rows if change is None else change


class Terms(NamedTuple):
    """Arguments of the objective.

    Attributes:
        features: (h, B, N, D p), of any precision; the others have that of sums.
        weights: W_1..W_D, (D, h, p, R).
        unfolded: from ``joint_factors``, (D, h, R, R^(D - 1)).
        factors: from there too, (D, h, p, R).
    """

    features: Tensor
    weights: Tensor
    unfolded: Tensor
    factors: Tensor


def objective_launches(terms: Terms, num_tokens: Tensor | int | None) -> Tensor:
    """``kmlsvd_objective`` of the standard variant, in few launches."""
    with without_autocast(terms.factors):
        count: Tensor | int = 1
        if isinstance(num_tokens, Tensor):
            count = num_tokens.clamp_min(1)[:, None, None]
        elif num_tokens is not None:
            count = max(num_tokens, 1)
        return _Objective.apply(count, terms.features, *map(exactly, terms[1:]))


class _Objective(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formulas."""

    @staticmethod
    def forward(ctx: Any, count: Tensor | int, *terms: Tensor) -> Tensor:
        ctx.count = count
        value, kept = _objective(Terms._make(terms), count)
        ctx.save_for_backward(*terms, *kept)
        return value

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # read once: activation checkpointing hands them out a single time
        terms, kept = Terms._make(saved[:4]), saved[4:]
        if torch.is_grad_enabled():
            leaves = differentiable_leaves(terms, ctx.needs_input_grad[1:])
            value = _formula(Terms._make(leaves), ctx.count)
            return None, *differentiable_gradients([value], leaves, ctx.needs_input_grad[1:], grads)
        with without_autocast(grads[0]):
            return None, *_objective_back(terms, ctx.count, kept, grads[0])


def _objective(terms: Terms, count: Tensor | int) -> tuple[Tensor, list[Tensor]]:
    """J, and what its backward pass reads.

    That is the factors times (S_(n) S_(n)^T)^-1, (D h, p, R); the Gram matrices, summed over the batch, times
    that; and in each mode the product of the other modes' Gram matrices, (D, h, B, p, p).
    """
    order, heads = terms.factors.shape[:2]
    batch, size = terms.features.size(1), terms.factors.size(2)
    factors, unfolded = terms.factors.flatten(0, 1), terms.unfolded.flatten(0, 1)
    grams = factors.new_empty(2 * order - 1, heads, batch, size, size)
    torch.div(mode_grams(terms.features, order).transpose(1, 2), count, out=grams[:order])
    solved = torch.bmm(factors, by_solving(torch.bmm(unfolded, unfolded.mT)))
    met = torch.bmm(grams[:order].sum(dim=2).flatten(0, 1), solved)
    # 1/2 mean Tr(E_n (S_(n) S_(n)^T)^-1 E_n^T) - (D - 1) Tr(W_n^T F_n) + (D - 2)/2 mean ||K||^2
    by_energy, by_alignment, by_norm = _scales(order, heads, batch)
    value, kept = met.new_empty(1, 1), [solved, met]
    value.addmm_(met.view(1, -1), factors.view(-1, 1), beta=0, alpha=by_energy)
    value.addmm_(terms.weights.reshape(1, -1), factors.view(-1, 1), alpha=by_alignment)
    if order > 2:  # ||K||^2 is the sum of the products of all modes' entries
        grams[order:] = grams[: order - 1]
        kept.append(functools.reduce(torch.mul, (grams[m : order + m] for m in range(1, order))))
        value.addmm_(kept[2][0].view(1, -1), grams[0].view(-1, 1), alpha=by_norm)
    return value.view(()), kept


def _scales(order: int, heads: int, batch: int) -> tuple[float, float, float]:
    """Of the energy, the alignment, which every mode gives once, and the kernel tensor's norm."""
    return 0.5 / (heads * batch), (1 - order) / (heads * order), 0.5 * (order - 2) / (heads * batch)


def _objective_back(
    terms: Terms, count: Tensor | int, kept: Sequence[Tensor], slope: Tensor
) -> tuple[Tensor, ...]:
    order, heads, size, _ = terms.factors.shape
    batch = terms.features.size(1)
    by_energy, by_alignment, by_norm = _scales(order, heads, batch)
    solved, met, *others = kept
    # E = Tr(F^T G F P): dF = 2 G F P, dG = F P F^T, and with P = (S S^T)^-1 dS = -2 P (F^T G F) P S
    ratio, slopes = by_energy / by_alignment, slope * by_alignment
    d_factors = torch.add(terms.weights, met.view_as(terms.weights), alpha=2 * ratio).mul_(slopes)
    d_weights = terms.factors * slopes
    shared = solved.new_empty(order, heads, 1, size, size)
    shared.flatten(0, 2).baddbmm_(solved, d_weights.flatten(0, 1).mT, beta=0, alpha=ratio)
    d_unfolded = torch.empty_like(terms.unfolded)
    d_inverse = torch.bmm(solved.mT, met).mul_(slopes)
    d_unfolded.flatten(0, 1).baddbmm_(d_inverse, terms.unfolded.flatten(0, 1), beta=0, alpha=-2 * ratio)
    d_grams = terms.features.new_zeros(heads, batch, order, size, order, size)
    blocks = d_grams.diagonal(dim1=2, dim2=4).permute(4, 0, 1, 2, 3)
    if others:
        torch.addcmul(shared, others[0], slope, value=by_norm, out=blocks)
    else:
        blocks.copy_(shared.expand_as(blocks))
    twice = 2.0 if isinstance(count, Tensor) else 2 / count  # of a symmetric matrix
    if isinstance(count, Tensor):
        d_grams /= count.view(-1, 1, 1, 1, 1)
    features = terms.features.flatten(0, 1)
    d_features = torch.empty_like(features)
    d_features.baddbmm_(features, d_grams.view(heads * batch, order * size, -1), beta=0, alpha=twice)
    return d_features.view_as(terms.features), d_weights, d_unfolded, d_factors


def _formula(terms: Terms, count: Tensor | int) -> Tensor:
    """The objective from differentiable operations."""
    grams = list(mode_grams(terms.features, terms.factors.size(0)).unbind())
    num_tokens = count.flatten() if isinstance(count, Tensor) else count
    core_grams = list((terms.unfolded @ terms.unfolded.mT).unbind())
    alignment = (terms.weights * terms.factors).sum() / terms.factors.size(0)
    return objective_of_grams(
        grams, list(terms.factors.unbind()), core_grams, alignment, num_tokens=num_tokens
    )
