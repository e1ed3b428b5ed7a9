"""Multilinear attention's one product per token, with its gradients written out.

Each of the J = D h modes of the heads maps the tokens to X W_j^T + 1 l_j^T, divides by its Frobenius norm and
goes on through V_j, so that all of them together give

    y = X M + 1 c^T,    M = sum_j s_j W_j^T V_j,    c = sum_j s_j V_j^T l_j,
    1 / s_j^2 = ||X W_j^T + 1 l_j^T||_F^2 = <X^T X, W_j^T W_j> + 2 <W_j X^T 1, l_j> + N ||l_j||^2.

The square of a norm has lost twice the digits that W_j takes from the tokens. So X should be centred, and the
levels l_j hold what its mean and the biases give to every token.

In short sequences the time is that of the calls, and automatic differentiation makes three times as many. A
gradient that is to be differentiated again comes from automatic differentiation all the same.

Legend: B batch, N tokens, d width, p width of a mode, B' = B, or 1 where V is that of all sequences.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.features.feature_maps import inverse_norm
from kernel_attention.tensors.recompute import differentiable_gradients
from kernel_attention.tensors.statistics import exactly, without_autocast


class _Options(NamedTuple):
    normalize: bool
    with_grams: bool
    group: SequenceGroup | None


class _Parts(NamedTuple):
    """What the forward pass computes, and the backward pass reads; None where it is not needed."""

    y: Tensor
    products: Tensor  # W_j^T V_j, (B', J, d, d)
    levels: Tensor  # V_j^T l_j, (B, J, d)
    scale: Tensor  # s_j, (B, J)
    matrix: Tensor  # M, (B, d, d)
    gram: Tensor | None = None  # X^T X, (B, d, d)
    total: Tensor | None = None  # X^T 1, (B, d)
    squares: Tensor | None = None  # W_j^T W_j, (J, d, d)
    met: Tensor | None = None  # the modes' Gram matrices before their normalisation, (J, B, p, p)


def multilinear_pass(
    x: Tensor,
    weight: Tensor,
    level: Tensor,
    maps: Tensor,
    constant: Tensor,
    count: Tensor,
    *,
    normalize: bool = True,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = X M + c + constant, (B, N, d) in the precision of x, and the normalised modes' Gram matrices,
    (J, B, p, p), or None.

    Args:
        x: (B, N, d), zero at padded tokens; better centred.
        weight: W_j, (J, p, d); float32 or better, as all that follow.
        level: l_j, (B, J, p).
        maps: V_j, (B', J, p, d).
        constant: (d,).
        count: number of real tokens, (B,); of all parts.
        normalize: whether to divide by the norms; s_j = 1 where not.
        with_grams: whether the modes' Gram matrices are wanted.
        group: processes that hold the parts of every sequence.
    """
    return _MultilinearPass.apply(
        x, weight, level, maps, constant, count, _Options(normalize, with_grams, group)
    )


def _compute(
    x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor, options: _Options
) -> tuple[_Parts, Tensor | None]:
    """Everything, and the normalised modes' Gram matrices."""
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
        x, weight, level, maps, constant, count = ctx.saved_tensors[:6]

        def outputs(*leaves: Tensor) -> tuple[Tensor, Tensor | None]:
            x, weight, level, maps, constant = leaves
            parts, grams = _compute(x, weight, level, maps, constant, count, ctx.options)
            return parts.y, grams

        with without_autocast(x):
            if not torch.is_grad_enabled():
                return *_gradients(ctx, x, weight, level, maps, grad_y, grad_grams), None, None
            inputs, needed = (x, weight, level, maps, constant), ctx.needs_input_grad[:5]
            return *differentiable_gradients(outputs, inputs, needed, (grad_y, grad_grams)), None, None


def _gradients(
    ctx: Any, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, grad_y: Tensor,
    grad_grams: Tensor | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """By x, weight, level, maps and constant."""
    parts = _Parts(grad_y, *ctx.saved_tensors[6:])
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
        by_gram, by_total = _through_sums(
            parts, weight, level, ctx.saved_tensors[5], by_energy, by_met, by_weight, by_level
        )
        _add_token_sums(grad_x, x, by_gram, by_total, ctx.options.group)
    return grad_x, by_weight, by_level, by_maps, total.sum(dim=0)


def _through_sums(
    parts: _Parts, weight: Tensor, level: Tensor, count: Tensor, by_energy: Tensor | None,
    by_met: Tensor | None, by_weight: Tensor, by_level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """From the slopes of the modes' Gram matrices, ``by_met`` (J, B, p, p), or of the norms alone,
    ``by_energy`` (B, J), twice the slopes of X^T X and the slopes of X^T 1; adds to those of W_j and l_j.
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
    """The gradient of ``_token_sums``; ``by_gram`` is twice its slope's symmetric part."""
    if group is not None:
        both = group.total(torch.cat([by_gram, by_total[:, None]], dim=1))
        by_gram, by_total = both[:, :-1], both[:, -1]
    grad_x.baddbmm_(x, by_gram.to(x.dtype))
    grad_x += by_total[:, None].to(x.dtype)


def _seen(weight: Tensor, total: Tensor, level: Tensor) -> Tensor:
    """W_j X^T 1, (B, J, p)."""
    return (total @ weight.flatten(0, 1).mT).view_as(level)


def _mode_grams(weight: Tensor, gram: Tensor, seen: Tensor, level: Tensor, count: Tensor) -> Tensor:
    """Gram matrices of X W_j^T + 1 l_j^T, (J, B, p, p), the sequences of a mode in one product."""
    right = gram @ weight.flatten(0, 1).mT  # (B, d, J p)
    right = right.unflatten(-1, weight.shape[:2]).permute(2, 1, 0, 3).flatten(2)  # (J, d, B p)
    centred = (weight @ right).unflatten(-1, (gram.size(0), -1)).transpose(1, 2)
    # seen l^T + l seen^T + N l l^T = (seen + N l / 2) l^T and its transpose
    half = (seen + 0.5 * count[:, None, None] * level)[..., None] * level[:, :, None]
    return centred + (half + half.mT).transpose(0, 1)
