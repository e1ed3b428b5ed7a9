"""Multilinear attention in few launches, for accelerators, where each costs 5 to 10 us whatever it computes.

All modes come from one product and are normalised together. Factors and concat map are multiplied out to the
maps V_n, so that a head's output is one product too, and the Gram matrices of all modes are another. The
backward pass of the objective is written by hand.

Legend: B batch, N tokens, h heads, D modes, p head width, R rank.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.multilinear.objective import kmlsvd_objective
from kernel_attention.tensors.affine import Affine, exact_product
from kernel_attention.tensors.features.feature_maps import FeatureMap, cosine, frobenius, identity
from kernel_attention.tensors.multilinear.unfoldings import by_solving, fold
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


class Terms(NamedTuple):
    """Arguments of the objective.

    Attributes:
        features: (h, B, N, D p), of any precision; the others have that of sums.
        weight: W_1, (h, p, R).
        core: S, (h, R, .., R).
        factors: (D, h, p, R).
    """

    features: Tensor
    weight: Tensor
    core: Tensor
    factors: Tensor


def objective_launches(terms: Terms, num_tokens: Tensor | int | None) -> Tensor:
    """``kmlsvd_objective`` of the standard variant, in few launches."""
    with without_autocast(terms.core):
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
        terms, kept = Terms._make(saved[:4]), _Kept._make(saved[4:])
        if torch.is_grad_enabled():
            leaves = differentiable_leaves(terms, ctx.needs_input_grad[1:])
            value = _formula(Terms._make(leaves), ctx.count)
            return None, *differentiable_gradients([value], leaves, ctx.needs_input_grad[1:], grads)
        with without_autocast(grads[0]):
            return None, *_objective_back(terms, ctx.count, kept, grads[0])


class _Kept(NamedTuple):
    """Tensors that the backward pass needs.

    Attributes:
        grams: Phi_n^T Phi_n, (D, h, B, p, p).
        unfolded: S_(n), (D h, R, R^(D - 1)).
        inverse: (S_(n) S_(n)^T)^-1, (D h, R, R).
        met: the Gram matrices, summed over the batch, times the factors, (D h, p, R).
        solved: the factors times the inverse, (D h, p, R).
    """

    grams: Tensor
    unfolded: Tensor
    inverse: Tensor
    met: Tensor
    solved: Tensor


def _objective(terms: Terms, count: Tensor | int) -> tuple[Tensor, _Kept]:
    order, heads = terms.factors.shape[:2]
    batch, size = terms.features.size(1), terms.factors.size(2)
    grams = terms.factors.new_empty(order, heads, batch, size, size)
    torch.div(mode_grams(terms.features, order).transpose(1, 2), count, out=grams)
    unfolded = torch.stack([terms.core.movedim(n, 1) for n in range(1, order + 1)]).flatten(0, 1).flatten(2)
    inverse = by_solving(torch.bmm(unfolded, unfolded.mT))
    factors = terms.factors.flatten(0, 1)
    met = torch.bmm(grams.sum(dim=2).flatten(0, 1), factors)
    solved = torch.bmm(factors, inverse)
    # 1/2 mean Tr(E_n (S_(n) S_(n)^T)^-1 E_n^T) - (D - 1) Tr(W_1^T F_1) + (D - 2)/2 mean ||K||^2
    by_energy, by_alignment, by_norm = _scales(order, heads, batch)
    value = met.new_empty(1, 1)
    value.addmm_(met.view(1, -1), solved.view(-1, 1), beta=0, alpha=by_energy)
    value.addmm_(terms.weight.reshape(1, -1), terms.factors[0].reshape(-1, 1), alpha=by_alignment)
    if order > 2:
        others = functools.reduce(torch.mul, grams[:-1].unbind())
        value.addmm_(others.view(1, -1), grams[-1].view(-1, 1), alpha=by_norm)
    return value.view(()), _Kept(grams, unfolded, inverse, met, solved)


def _scales(order: int, heads: int, batch: int) -> tuple[float, float, float]:
    """Of the energy, the alignment and the kernel tensor's norm."""
    return 0.5 / (heads * batch), (1 - order) / heads, 0.5 * (order - 2) / (heads * batch)


def _objective_back(
    terms: Terms, count: Tensor | int, kept: _Kept, slope: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    order, heads, size, _ = terms.factors.shape
    batch = terms.features.size(1)
    by_energy, alignment, by_norm = _scales(order, heads, batch)
    by_alignment = slope * alignment
    factors, inverse = terms.factors.flatten(0, 1), kept.inverse * slope
    # E = Tr(F^T G F P): dF = 2 G F P, dG = F P F^T, dP = F^T G F
    d_factors = torch.empty_like(terms.factors)
    d_factors.flatten(0, 1).baddbmm_(kept.met, inverse, beta=0, alpha=2 * by_energy)
    d_factors[0].addcmul_(terms.weight, by_alignment)
    shared = factors.new_empty(order, heads, 1, size, size)
    solved = torch.bmm(factors, inverse)
    shared.flatten(0, 2).baddbmm_(solved, factors.mT, beta=0, alpha=by_energy)
    d_grams = terms.features.new_zeros(heads, batch, order, size, order, size)
    blocks = d_grams.diagonal(dim1=2, dim2=4).permute(4, 0, 1, 2, 3)
    if order > 2:  # ||K||^2 is the sum of the products of all modes' entries
        others = torch.empty_like(kept.grams)
        for n in range(order):
            first, second, *rest = (gram for m, gram in enumerate(kept.grams.unbind()) if m != n)
            torch.mul(first, second, out=others[n])
            for gram in rest:
                others[n].mul_(gram)
        torch.addcmul(shared, others, slope, value=by_norm, out=blocks)
    else:
        blocks.copy_(shared.expand_as(blocks))
    twice = 2.0 if isinstance(count, Tensor) else 2 / count  # of a symmetric matrix
    if isinstance(count, Tensor):
        d_grams /= count.view(-1, 1, 1, 1, 1)
    features = terms.features.flatten(0, 1)
    d_features = torch.empty_like(features)
    d_features.baddbmm_(features, d_grams.view(heads * batch, order * size, -1), beta=0, alpha=twice)
    # P = (S S^T)^-1: dS = -2 P dP P S
    d_inverse = torch.bmm(torch.bmm(kept.solved.mT, kept.met), inverse)
    d_unfolded = torch.empty_like(kept.unfolded).baddbmm_(
        d_inverse, kept.unfolded, beta=0, alpha=-2 * by_energy
    )
    shape = terms.core.shape[1:]
    folded = [fold(each, n, shape) for n, each in enumerate(d_unfolded.unflatten(0, (order, heads)))]
    d_core = functools.reduce(torch.add, folded)
    return d_features.view_as(terms.features), terms.factors[0] * by_alignment, d_core, d_factors


def _formula(terms: Terms, count: Tensor | int) -> Tensor:
    """The objective from differentiable operations; of the weights it reads the first mode's alone."""
    order = terms.factors.size(0)
    grams = mode_grams(terms.features, order)
    num_tokens = count.flatten() if isinstance(count, Tensor) else count
    weights = [terms.weight] * order
    return kmlsvd_objective(
        list(grams.unbind()), weights, terms.core, factors=list(terms.factors.unbind()), num_tokens=num_tokens
    )
