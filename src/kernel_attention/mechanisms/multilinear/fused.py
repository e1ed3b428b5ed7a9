"""A whole multilinear layer as one product per token, with its gradients written out.

The feature maps are linear here: the Frobenius map divides by one number per sequence, so E_n is linear in
the tokens. There are J = D h modes over all heads. Each maps the tokens to X W_j^T + 1 l_j^T, divides by the
Frobenius norm, and multiplies by V_j. Together they give

    y = X M + 1 c^T,    M = sum_j s_j W_j^T V_j,    c = sum_j s_j V_j^T l_j,
    1 / s_j^2 = ||X W_j^T + 1 l_j^T||_F^2 = <X^T X, W_j^T W_j> + 2 <W_j X^T 1, l_j> + N ||l_j||^2.

A token costs one (d, d) product. A second one, X^T X, gives the norms and Gram matrices of the modes.
Cancellation in W_j x costs the square of the norm twice as many digits as the norm, and a common part of the
tokens would drown their differences in the squares. So X is centred. The levels l_j then hold the
contributions of the mean and of the biases to every token.

For short sequences the number of calls decides the time, and automatic differentiation makes three times as
many. Where the gradient itself is differentiated, automatic differentiation is used all the same.

Source as in ``kernel_attention.mechanisms.multilinear.functional``.

Legend: B batch, N tokens, d width, h heads, D modes, p width of a mode, B' = B, or 1 where all sequences
share V.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.features.feature_maps import balanced, frobenius, inverse_norm
from kernel_attention.mechanisms.multilinear.functional import padded_rows
from kernel_attention.tensors.affine import Affine, autocast
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, num_real, without_autocast


def multilinear_layer(
    x: Tensor,
    modes: Sequence[Affine],
    factors: Sequence[Tensor],
    concat: Affine,
    out_proj: Affine,
    *,
    rows: Tensor | None = None,
    normalize: bool = True,
    attention_mask: Tensor | None = None,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, list[Tensor] | None]:
    """The layer's output and, where wanted, the modes' Gram matrices; not causal.

    The results are those of ``multilinear_modes`` and ``join_modes`` between the projections, up to rounding.
    It takes O(N d^2) time, and O(D d^3) per sequence.

    Args:
        x: (B, N, d).
        modes: projections to queries, keys and fibers, (d, d) each.
        factors: from ``multilinear_factors``, (h, M, R) each.
        concat: W_c (p, D R) and its bias, shared by the heads.
        out_proj: (d, d).
        rows: sampled rows f(X), (B, h, M', p): the data-dependent form.
        normalize: Frobenius feature map; False: identity.
        attention_mask: (B, N), True = real token.
        with_grams: whether the objective needs the Gram matrices.
        group: processes that hold the parts of every sequence; ``rows`` are those of the whole sequence.

    Returns:
        y (B, N, d), and D tensors (B, h, M_n, M_n) as in ``Modes``, or None.
    """
    x = autocast(x)
    if attention_mask is not None:
        x = x.masked_fill(~attention_mask[..., None], 0.0)  # padding may hold any value, also NaN
    with without_autocast(x):
        projections = torch.stack([exactly(factor) for factor in factors])[:, None]  # (D, 1, h, M, R)
        num_modes = len(modes) * projections.size(2)
        weight = torch.cat([exactly(matrix) for matrix, _ in modes])  # (D h p, d)
        if rows is not None:
            rows = exactly(padded_rows(rows, projections[0, 0]))
            projections = rows.mT @ projections
        maps, constant = _after_features(projections, concat, out_proj)
        middle, count = _middle(x, attention_mask, group)
        centred = (x - middle[:, None]).to(x.dtype)
        if attention_mask is not None:
            centred = centred.masked_fill(~attention_mask[..., None], 0.0)
        level = torch.nn.functional.linear(middle, weight, _biases(modes)).unflatten(1, (num_modes, -1))
        if normalize:
            size = _size(centred, level, group)
            centred, level = balanced(centred, size), balanced(level, size)
        y, grams = _MultilinearPass.apply(
            centred, weight.unflatten(0, (num_modes, -1)), level, maps, constant, count,
            _Options(normalize, with_grams, group),
        )  # fmt: skip
        if grams is None:
            return y, None
        grams = grams.unflatten(0, (len(modes), -1)).transpose(1, 2)  # (D, B, h, p, p)
        if rows is not None:
            normed = frobenius(rows)
            grams = normed @ grams @ normed.mT
        return y, list(grams.unbind())


def _middle(x: Tensor, mask: Tensor | None, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """The mean of the real tokens over all parts, (B, d) in float32 or better, and their number (B,).

    x (B, N, d) is zero at padded tokens. Differentiation takes the mean for a constant: the layer is the same
    function whatever is subtracted from the tokens and added to the levels.
    """
    with torch.no_grad():
        count, total = num_real(x, mask), x.sum(dim=1, dtype=accumulation_dtype(x.dtype))
        if group is not None:
            count, total = group.places(count)[1], group.total(total)
        return total / count.clamp_min(1)[:, None], count


def _size(centred: Tensor, level: Tensor, group: SequenceGroup | None) -> Tensor:
    """About the largest entry that enters the norms of a sequence, (B, 1, 1) in float32 or better."""
    with torch.no_grad():
        of_tokens, of_levels = (exactly(x).abs().amax(dim=(1, 2), keepdim=True) for x in (centred, level))
        return of_levels.maximum(of_tokens if group is None else group.total(of_tokens))


def _biases(modes: Sequence[Affine]) -> Tensor | None:
    """Every mode's bias, (D d,), or None."""
    biases = [exactly(bias) for _, bias in modes if bias is not None]
    return torch.cat(biases) if biases else None


def _after_features(projections: Tensor, concat: Affine, out_proj: Affine) -> tuple[Tensor, Tensor]:
    """The layer after the features of a mode: maps (B or 1, D h, p, d) and the constant (d,)."""
    join = exactly(concat[0]).unflatten(1, (projections.size(0), -1)).permute(1, 2, 0)  # (D, R, p)
    out = exactly(out_proj[0]).mT.unflatten(0, (projections.size(2), -1))  # (h, p, d)
    joined = (projections.flatten(1, 3) @ join).unflatten(1, projections.shape[1:4])
    joined = joined.permute(2, 1, 0, 3, 4)  # (h, B or 1, D, p, p)
    maps = (joined.flatten(1, 3) @ out).unflatten(1, joined.shape[1:4])
    maps = maps.permute(1, 2, 0, 3, 4).flatten(1, 2)
    constant = out.new_zeros(out.size(-1)) if out_proj[1] is None else exactly(out_proj[1])
    if concat[1] is not None:
        constant = constant + exactly(concat[1]).expand(out.size(0), -1).flatten() @ out.flatten(0, 1)
    return maps, constant


class _Options(NamedTuple):
    """What is not differentiated."""

    normalize: bool
    with_grams: bool
    group: SequenceGroup | None


class _Parts(NamedTuple):
    """The results of the forward pass that the backward pass reads; None where it does not need them."""

    y: Tensor
    products: Tensor  # W_j^T V_j, (B', J, d, d)
    levels: Tensor  # V_j^T l_j, (B, J, d)
    scale: Tensor  # s_j, (B, J)
    matrix: Tensor  # M, (B, d, d)
    gram: Tensor | None = None  # X^T X, (B, d, d)
    total: Tensor | None = None  # X^T 1, (B, d)
    squares: Tensor | None = None  # W_j^T W_j, (J, d, d)
    met: Tensor | None = None  # the modes' Gram matrices before their normalisation, (J, B, p, p)


def _compute(
    x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor, options: _Options
) -> tuple[_Parts, Tensor | None]:
    """All parts, and the normalised modes' Gram matrices."""
    products = weight.mT @ maps
    levels = (level[:, :, None] @ maps)[:, :, 0]
    gram, total, squares, met, scale = None, None, None, None, level.new_ones(level.shape[:2])
    if options.normalize or options.with_grams:
        gram, total = _token_sums(x, options.group)
        seen = _seen(weight, total, level)
        if options.normalize:
            squares = weight.mT @ weight
            energy = gram.flatten(1) @ squares.flatten(1).mT
            energy = energy + (level * (2 * seen + count[:, None, None] * level)).sum(dim=-1)
            scale = inverse_norm(energy)
        if options.with_grams:
            met = _mode_grams(weight, gram, seen, level, count)
    matrix = (scale[:, None] @ products.flatten(2)).view(-1, *products.shape[2:])
    added = constant + (scale[:, None] @ levels)[:, 0]
    y = torch.baddbmm(added[:, None].to(x.dtype), x, matrix.to(x.dtype))
    grams = None if met is None else met * scale.mT[..., None, None].square()
    return _Parts(y, products, levels, scale, matrix, gram, total, squares, met), grams


class _MultilinearPass(torch.autograd.Function):
    """y = X M + 1 c^T + constant, (B, N, d), and the normalised modes' Gram matrices, (J, B, p, p), or None.

    y has the precision of x. The inputs are x (B, N, d), which is zero at padded tokens and should be
    centred; W_j (J, p, d), l_j (B, J, p), V_j (B', J, p, d) and the constant (d,), all in float32 or better;
    and the number of real tokens of all parts, (B,).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor,
        options: _Options,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        with without_autocast(x):
            parts, grams = _compute(x, weight, level, maps, constant, count, options)
        ctx.save_for_backward(x, weight, level, maps, constant, count, *parts[1:])
        ctx.options = options
        return parts.y, grams

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor, grad_grams: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands a saved tensor out a single time.
        x, weight, level, maps, constant, count, *kept = ctx.saved_tensors
        with without_autocast(x):
            if not torch.is_grad_enabled():
                return *_gradients(ctx, x, weight, level, maps, count, kept, grad_y, grad_grams), None, None
            needed = ctx.needs_input_grad[:5]
            leaves = differentiable_leaves((x, weight, level, maps, constant), needed)
            x, weight, level, maps, constant = leaves
            parts, grams = _compute(x, weight, level, maps, constant, count, ctx.options)
            first = differentiable_gradients((parts.y, grams), leaves, needed, (grad_y, grad_grams))
            return *first, None, None


def _gradients(
    ctx: Any, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, count: Tensor, kept: list[Tensor],
    grad_y: Tensor, grad_grams: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By x, weight, level, maps and constant."""
    parts = _Parts(grad_y, *kept)
    scale = parts.scale
    exact_grad = exactly(grad_y)
    total = exact_grad.sum(dim=1)  # (B, d)
    by_matrix = (exactly(x).mT @ exact_grad).flatten(1)  # (B, d d)
    by_levels = scale[..., None] * total[:, None]  # (B, J, d)
    by_level = (maps @ by_levels[..., None])[..., 0]
    if maps.size(0) == 1:
        by_products = (scale.mT @ by_matrix).view_as(parts.products)
        by_maps = weight @ by_products + level.permute(1, 2, 0) @ by_levels.transpose(0, 1)
    else:
        by_products = (scale[..., None] * by_matrix[:, None]).view_as(parts.products)
        by_maps = (weight @ by_products).addcmul_(level[..., None], by_levels[:, :, None])
    by_weight = (maps @ by_products.mT).sum(dim=0)
    grad_x = grad_y @ parts.matrix.to(x.dtype).mT
    by_energy, by_met = None, None
    if parts.squares is not None:
        by_scale = (parts.products.flatten(2) @ by_matrix[..., None])[..., 0]
        by_scale = by_scale + (parts.levels @ total[..., None])[..., 0]  # (B, J)
        if parts.met is not None and grad_grams is not None:
            by_scale = by_scale + 2 * scale * (parts.met * grad_grams).sum(dim=(2, 3)).mT
        by_energy = -(scale**3) * by_scale  # twice the slope of s by the square of 1 / s
    if parts.met is not None and grad_grams is not None:
        by_met = (grad_grams + grad_grams.mT) * scale.mT[..., None, None].square()  # (J, B, p, p)
        if by_energy is not None:  # the square of a norm is the trace of the mode's Gram matrix
            by_met.diagonal(dim1=-2, dim2=-1).add_(by_energy.mT[..., None])
    if by_energy is not None or by_met is not None:
        by_gram, by_total = _through_sums(parts, weight, level, count, by_energy, by_met, by_weight, by_level)
        _add_token_sums(grad_x, x, by_gram, by_total, ctx.options.group)
    return grad_x, by_weight, by_level, by_maps, total.sum(dim=0)


def _through_sums(
    parts: _Parts, weight: Tensor, level: Tensor, count: Tensor, by_energy: Tensor | None,
    by_met: Tensor | None, by_weight: Tensor, by_level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Twice the gradient of X^T X and the gradient of X^T 1; adds to the gradients of W_j and l_j.

    They come from the gradient of the modes' Gram matrices, ``by_met`` (J, B, p, p), or of the norms alone,
    ``by_energy`` (B, J).
    """
    assert parts.gram is not None and parts.total is not None  # noqa: PT018
    reach = _seen(weight, parts.total, level) + count[:, None, None] * level  # of all tokens of a mode
    if by_met is not None:
        left = (by_met.flatten(1, 2) @ weight).view(*by_met.shape[:3], -1)  # (J, B, p, d)
        by_weight += (left @ parts.gram).sum(dim=1)
        by_gram = weight.flatten(0, 1).mT @ left.transpose(0, 1).flatten(1, 2)
        both = (by_met @ torch.stack([level, reach], dim=-1).transpose(0, 1)).transpose(0, 1)
        pull, by_reach = both.unbind(-1)
    else:
        assert parts.squares is not None and by_energy is not None  # noqa: PT018
        by_weight.baddbmm_(weight, (by_energy.mT @ parts.gram.flatten(1)).view_as(parts.squares))
        by_gram = (by_energy @ parts.squares.flatten(1)).view_as(parts.gram)
        pull, by_reach = (by_energy[..., None] * each for each in (level, reach))
    by_weight += (pull.flatten(1).mT @ parts.total).view_as(weight)
    by_level += by_reach
    return by_gram, pull.flatten(1) @ weight.flatten(0, 1)


def _token_sums(x: Tensor, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """X^T X (B, d, d) and X^T 1 (B, d) in float32 or better, over all parts."""
    exact = exactly(x)
    gram, total = exact.mT @ exact, exact.sum(dim=1)
    if group is not None:
        both = group.total(torch.cat([gram, total[:, None]], dim=1))
        gram, total = both[:, :-1], both[:, -1]
    return gram, total


def _add_token_sums(
    grad_x: Tensor, x: Tensor, by_gram: Tensor, by_total: Tensor, group: SequenceGroup | None
) -> None:
    """The gradient of ``_token_sums``; ``by_gram`` is twice the symmetric part of the gradient of X^T X."""
    if group is not None:
        both = group.total(torch.cat([by_gram, by_total[:, None]], dim=1))
        by_gram, by_total = both[:, :-1], both[:, -1]
    grad_x.baddbmm_(x, by_gram.to(x.dtype))
    grad_x += by_total[:, None].to(x.dtype)


def _seen(weight: Tensor, total: Tensor, level: Tensor) -> Tensor:
    """W_j X^T 1, (B, J, p)."""
    return (total @ weight.flatten(0, 1).mT).view_as(level)


def _mode_grams(weight: Tensor, gram: Tensor, seen: Tensor, level: Tensor, count: Tensor) -> Tensor:
    """The Gram matrices of X W_j^T + 1 l_j^T, (J, B, p, p); one product serves all sequences of a mode."""
    right = gram @ weight.flatten(0, 1).mT  # (B, d, J p)
    right = right.unflatten(-1, weight.shape[:2]).permute(2, 1, 0, 3).flatten(2)  # (J, d, B p)
    centred = (weight @ right).unflatten(-1, (gram.size(0), -1)).transpose(1, 2)
    # seen l^T + l seen^T + N l l^T = (seen + N l / 2) l^T and its transpose
    half = (seen + 0.5 * count[:, None, None] * level)[..., None] * level[:, :, None]
    return centred + (half + half.mT).transpose(0, 1)
