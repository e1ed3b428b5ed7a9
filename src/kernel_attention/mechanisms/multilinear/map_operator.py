"""The product of ``cpu.py``, as an operator of PyTorch.

A compiler does not look into an operator. So ``torch.compile``, ``torch.export`` and activation checkpointing
keep the gradients that are written out here. An eager call takes the same functions without the operator,
because its dispatch would cost a short sequence a part of its training step. So does a sharded layer, whose
collectives no operator holds. Where the gradient itself is differentiated, it comes from automatic
differentiation of the product.

Legend as in ``cpu.py``, with J = D h modes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.tensors.features.feature_maps import inverse_norm
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_operator,
)
from kernel_attention.tensors.statistics import exactly, without_autocast


def modes_and_maps(
    x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor,
    *, normalize: bool, with_grams: bool, group: SequenceGroup | None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """y = X M + 1 c^T + constant, (B, N, d), and the normalised modes' Gram matrices, (J, B, p, p), or None.

    Args:
        x: (B, N, d), zero at padded tokens; it should be centred. y has its precision.
        weight: W_j, (J, p, d); this and what follows is in float32 or better.
        level: l_j, (B, J, p).
        maps: V_j, (B', J, p, d).
        constant: (d,).
        count: the number of real tokens of all parts, (B,).
        normalize: whether modes are divided by their norms.
        with_grams: whether the Gram matrices are wanted.
        group: processes that hold the parts of every sequence.
    """
    inputs = x, weight, level, maps, constant, count, normalize, with_grams
    if group is None and needs_operator(x):
        y, grams, *_ = _map(*inputs)
        return y, grams if with_grams else None
    return _EagerMap.apply(*inputs, group)


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
    x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor, normalize: bool,
    with_grams: bool, group: SequenceGroup | None,
) -> tuple[_Parts, Tensor | None]:  # fmt: skip
    """All parts, and the normalised modes' Gram matrices."""
    products = weight.mT @ maps
    levels = (level[:, :, None] @ maps)[:, :, 0]
    gram, total, squares, met, scale = None, None, None, None, level.new_ones(level.shape[:2])
    if normalize or with_grams:
        gram, total = _token_sums(x, group)
        seen = _seen(weight, total, level)
        if normalize:
            squares = weight.mT @ weight
            energy = gram.flatten(1) @ squares.flatten(1).mT
            energy = energy + (level * (2 * seen + count[:, None, None] * level)).sum(dim=-1)
            scale = inverse_norm(energy)
        if with_grams:
            met = _mode_grams(weight, gram, seen, level, count)
    matrix = (scale[:, None] @ products.flatten(2)).view(-1, *products.shape[2:])
    added = constant + (scale[:, None] @ levels)[:, 0]
    y = torch.baddbmm(added[:, None].to(x.dtype), x, matrix.to(x.dtype))
    grams = None if met is None else met * scale.mT[..., None, None].square()
    return _Parts(y, products, levels, scale, matrix, gram, total, squares, met), grams


def _forward(
    x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor, normalize: bool,
    with_grams: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the Gram matrices and the rest of ``_Parts``; empty tensors for None, which no operator returns."""
    with without_autocast(x):
        (y, *kept), grams = _compute(x, weight, level, maps, constant, count, normalize, with_grams, None)
    found = (x.new_empty(0) if part is None else part for part in (grams, *kept))
    return (y, *found)  # type: ignore[return-value]


def _backward(
    grad_y: Tensor, grad_grams: Tensor | None, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor,
    count: Tensor, kept: Sequence[Tensor], normalize: bool, with_grams: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By x, weight, level, maps and constant; ``kept`` is what ``_forward`` returns after the grams."""
    *before, gram, total, squares, met = kept
    sums = (gram, total) if normalize or with_grams else (None, None)
    parts = _Parts._make(
        (grad_y, *before, *sums, squares if normalize else None, met if with_grams else None)
    )
    with without_autocast(x):
        return _gradients(parts, x, weight, level, maps, count, grad_grams, None)


_map = torch.library.custom_op("kernel_attention::multilinear_map", _forward, mutates_args=())
_map_backward = torch.library.custom_op(
    "kernel_attention::multilinear_map_backward", _backward, mutates_args=()
)
_map.register_fake(_forward)
_map_backward.register_fake(_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:6], *output[2:])
    ctx.normalize, ctx.with_grams = inputs[6:]
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any, grad_y: Tensor | None, grad_grams: Tensor | None, *_: Tensor | None
) -> tuple[Tensor | None, ...]:
    x, weight, level, maps, constant, count, *kept = ctx.saved_tensors
    inputs = x, weight, level, maps, constant, count
    if torch.is_grad_enabled():
        return (*_twice(ctx, inputs, grad_y, grad_grams, None), None, None, None)
    grad_y = x.new_zeros(x.shape) if grad_y is None else grad_y
    found = _map_backward(
        grad_y, grad_grams, x, weight, level, maps, count, kept, ctx.normalize, ctx.with_grams
    )
    return (*found, None, None, None)


_map.register_autograd(_pull_back, setup_context=_keep)


class _EagerMap(torch.autograd.Function):
    """The operator's functions, called as they are, with the collectives of a group."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, constant: Tensor, count: Tensor,
        normalize: bool, with_grams: bool, group: SequenceGroup | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        inputs = x, weight, level, maps, constant, count
        with without_autocast(x):
            parts, grams = _compute(*inputs, normalize, with_grams, group)
        ctx.save_for_backward(*inputs, *parts[1:])
        ctx.normalize, ctx.with_grams, ctx.group = normalize, with_grams, group
        ctx.set_materialize_grads(False)
        return parts.y, grams

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor | None, grad_grams: Tensor | None) -> tuple[Tensor | None, ...]:
        # Read once: activation checkpointing hands a saved tensor out a single time.
        x, weight, level, maps, constant, count, *kept = ctx.saved_tensors
        others = (None,) * 4
        if torch.is_grad_enabled():
            inputs = x, weight, level, maps, constant, count
            return (*_twice(ctx, inputs, grad_y, grad_grams, ctx.group), *others)
        parts = _Parts(x.new_zeros(x.shape) if grad_y is None else grad_y, *kept)
        with without_autocast(x):
            return (*_gradients(parts, x, weight, level, maps, count, grad_grams, ctx.group), *others)


def _twice(
    ctx: Any, inputs: tuple[Tensor, ...], grad_y: Tensor | None, grad_grams: Tensor | None,
    group: SequenceGroup | None,
) -> list[Tensor | None]:  # fmt: skip
    """Gradients of all inputs but the count, that can be differentiated."""
    needed = ctx.needs_input_grad[:5]
    leaves = x, weight, level, maps, constant = differentiable_leaves(inputs[:5], needed)
    with without_autocast(x):
        parts, grams = _compute(
            x, weight, level, maps, constant, inputs[5], ctx.normalize, ctx.with_grams, group
        )
        return differentiable_gradients((parts.y, grams), leaves, needed, (grad_y, grad_grams))


def _gradients(
    parts: _Parts, x: Tensor, weight: Tensor, level: Tensor, maps: Tensor, count: Tensor,
    grad_grams: Tensor | None, group: SequenceGroup | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """By x, weight, level, maps and constant; ``parts`` has the gradient of y in its place."""
    grad_y, scale = parts.y, parts.scale
    exact_grad = exactly(grad_y)
    total = exact_grad.sum(dim=1)  # (B, d)
    d_matrix = (exactly(x).mT @ exact_grad).flatten(1)  # (B, d d)
    d_levels = scale[..., None] * total[:, None]  # (B, J, d)
    d_level = (maps @ d_levels[..., None])[..., 0]
    if maps.size(0) == 1:
        d_products = (scale.mT @ d_matrix).view_as(parts.products)
        d_maps = weight @ d_products + level.permute(1, 2, 0) @ d_levels.transpose(0, 1)
    else:
        d_products = (scale[..., None] * d_matrix[:, None]).view_as(parts.products)
        d_maps = (weight @ d_products).addcmul_(level[..., None], d_levels[:, :, None])
    d_weight = (maps @ d_products.mT).sum(dim=0)
    grad_x = grad_y @ parts.matrix.to(x.dtype).mT
    d_energy, d_met = None, None
    if parts.squares is not None:
        d_scale = (parts.products.flatten(2) @ d_matrix[..., None])[..., 0]
        d_scale = d_scale + (parts.levels @ total[..., None])[..., 0]  # (B, J)
        if parts.met is not None and grad_grams is not None:
            d_scale = d_scale + 2 * scale * (parts.met * grad_grams).sum(dim=(2, 3)).mT
        d_energy = -(scale**3) * d_scale  # twice the slope of s by the square of 1 / s
    if parts.met is not None and grad_grams is not None:
        d_met = (grad_grams + grad_grams.mT) * scale.mT[..., None, None].square()  # (J, B, p, p)
        if d_energy is not None:  # the square of a norm is the trace of the mode's Gram matrix
            d_met.diagonal(dim1=-2, dim2=-1).add_(d_energy.mT[..., None])
    if d_energy is not None or d_met is not None:
        d_gram, d_total = _through_sums(parts, weight, level, count, d_energy, d_met, d_weight, d_level)
        _add_token_sums(grad_x, x, d_gram, d_total, group)
    return grad_x, d_weight, d_level, d_maps, total.sum(dim=0)


def _through_sums(
    parts: _Parts, weight: Tensor, level: Tensor, count: Tensor, d_energy: Tensor | None,
    d_met: Tensor | None, d_weight: Tensor, d_level: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Twice the gradient of X^T X and the gradient of X^T 1; adds to the gradients of W_j and l_j.

    They come from the gradient of the modes' Gram matrices, ``d_met`` (J, B, p, p), or of the norms alone,
    ``d_energy`` (B, J).
    """
    assert parts.gram is not None and parts.total is not None  # noqa: PT018
    reach = _seen(weight, parts.total, level) + count[:, None, None] * level  # of all tokens of a mode
    if d_met is not None:
        left = (d_met.flatten(1, 2) @ weight).view(*d_met.shape[:3], weight.size(2))  # (J, B, p, d)
        d_weight += (left @ parts.gram).sum(dim=1)
        d_gram = weight.flatten(0, 1).mT @ left.transpose(0, 1).flatten(1, 2)
        both = (d_met @ torch.stack([level, reach], dim=-1).transpose(0, 1)).transpose(0, 1)
        pull, d_reach = both.unbind(-1)
    else:
        assert parts.squares is not None and d_energy is not None  # noqa: PT018
        d_weight.baddbmm_(weight, (d_energy.mT @ parts.gram.flatten(1)).view_as(parts.squares))
        d_gram = (d_energy @ parts.squares.flatten(1)).view_as(parts.gram)
        pull, d_reach = (d_energy[..., None] * each for each in (level, reach))
    d_weight += (pull.flatten(1).mT @ parts.total).view_as(weight)
    d_level += d_reach
    return d_gram, pull.flatten(1) @ weight.flatten(0, 1)


def _token_sums(x: Tensor, group: SequenceGroup | None) -> tuple[Tensor, Tensor]:
    """X^T X (B, d, d) and X^T 1 (B, d) in float32 or better, over all parts."""
    exact = exactly(x)
    gram, total = exact.mT @ exact, exact.sum(dim=1)
    if group is not None:
        both = group.total(torch.cat([gram, total[:, None]], dim=1))
        gram, total = both[:, :-1], both[:, -1]
    return gram, total


def _add_token_sums(
    grad_x: Tensor, x: Tensor, d_gram: Tensor, d_total: Tensor, group: SequenceGroup | None
) -> None:
    """The gradient of ``_token_sums``; ``d_gram`` is twice the symmetric part of the gradient of X^T X."""
    if group is not None:
        both = group.total(torch.cat([d_gram, d_total[:, None]], dim=1))
        d_gram, d_total = both[:, :-1], both[:, -1]
    grad_x.baddbmm_(x, d_gram.to(x.dtype))
    grad_x += d_total[:, None].to(x.dtype)


def _seen(weight: Tensor, total: Tensor, level: Tensor) -> Tensor:
    """W_j X^T 1, (B, J, p)."""
    return (total @ weight.flatten(0, 1).mT).view_as(level)


def _mode_grams(weight: Tensor, gram: Tensor, seen: Tensor, level: Tensor, count: Tensor) -> Tensor:
    """The Gram matrices of X W_j^T + 1 l_j^T, (J, B, p, p); one product serves all sequences of a mode."""
    right = gram @ weight.flatten(0, 1).mT  # (B, d, J p)
    right = right.unflatten(-1, weight.shape[:2]).permute(2, 1, 0, 3).flatten(2)  # (J, d, B p)
    centred = (weight @ right).unflatten(-1, (gram.size(0), weight.size(1))).transpose(1, 2)
    # seen l^T + l seen^T + N l l^T = (seen + N l / 2) l^T and its transpose
    half = (seen + 0.5 * (count[:, None, None] * level))[..., None] * level[:, :, None]
    return centred + (half + half.mT).transpose(0, 1)
