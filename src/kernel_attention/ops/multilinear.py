"""Multilinear attention's one product per token, with its gradients written out.

Each of the J = D h modes of the heads maps the tokens to X W_j^T, divides by its Frobenius norm and goes on
through V_j, so that all of them together give

    y = X M,    M = sum_j s_j W_j^T V_j,    s_j = 1 / ||X W_j^T||_F,    ||X W_j^T||_F^2 = <X^T X, W_j^T W_j>.

In short sequences the time is that of the calls, and automatic differentiation makes three times as many.

Legend: B batch, N tokens, d width, d' = d + 1 where there are biases (X has a column of ones then) or d, p
width of a mode, B' = B, or 1 where V is that of all sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from kernel_attention.kernels.feature_maps import inverse_norm
from kernel_attention.kernels.statistics import exactly
from kernel_attention.ops.sequence_group import SequenceGroup


def multilinear_pass(
    x: Tensor,
    weight: Tensor,
    maps: Tensor,
    constant: Tensor,
    count: Tensor | None,
    *,
    normalize: bool = True,
    with_grams: bool = False,
    group: SequenceGroup | None = None,
) -> tuple[Tensor, Tensor | None]:
    """y = X M + constant, (B, N, d) in the precision of x, and s_j^2 W_j X^T X W_j^T, (J, B, p, p), or None.

    First derivatives only.

    Args:
        x: (B, N, d), zero at padded tokens.
        weight: W_j, (J, p, d'), its biases in the last column; float32 or better, as all that follow.
        maps: V_j, (B', J, p, d).
        constant: (d,).
        count: number of real tokens, (B,); None where there are no biases.
        normalize: whether to divide by the norms; s_j = 1 where not.
        with_grams: whether the modes' Gram matrices are wanted.
        group: processes that hold the parts of every sequence.
    """
    return _MultilinearPass.apply(x, weight, maps, constant, count, normalize, with_grams, group)


class _MultilinearPass(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, maps: Tensor, constant: Tensor, count: Tensor | None,
        normalize: bool, with_grams: bool, group: SequenceGroup | None,
    ) -> tuple[Tensor, Tensor | None]:  # fmt: skip
        with torch.autocast(x.device.type, enabled=False):
            products = weight.mT @ maps  # (B', J, d', d)
            gram, squares, met, scale = None, None, None, weight.new_ones(x.size(0), weight.size(0))
            if normalize or with_grams:
                gram = _token_gram(x, count)
                gram = gram if group is None else group.total(gram)
            if gram is not None and normalize:
                squares = weight.mT @ weight
                scale = inverse_norm(gram.flatten(1) @ squares.flatten(1).mT)  # (B, J)
            if gram is not None and with_grams:
                met = _mode_grams(weight, gram)
            matrix = (scale[:, None] @ products.flatten(2)).view(-1, *products.shape[2:])  # (B, d', d)
            added = constant if count is None else constant + matrix[:, -1:]
            y = torch.baddbmm(added.to(x.dtype), x, matrix[:, : x.size(2)].to(x.dtype))
        ctx.save_for_backward(x, weight, maps, products, gram, squares, met, scale, matrix)
        ctx.has_ones, ctx.group = count is not None, group
        return y, None if met is None else met * scale.mT[..., None, None].square()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_y: Tensor, grad_grams: Tensor | None) -> tuple[Tensor | None, ...]:
        x, weight, maps, products, gram, squares, met, scale, matrix = ctx.saved_tensors
        width = x.size(2)
        with torch.autocast(x.device.type, enabled=False):
            exact_grad = exactly(grad_y)
            total = exact_grad.sum(dim=1)  # (B, d)
            by_matrix = exactly(x).mT @ exact_grad
            if ctx.has_ones:
                by_matrix = torch.cat([by_matrix, total[:, None]], dim=1)
            by_matrix = by_matrix.flatten(1)  # (B, d' d)
            if products.size(0) == 1:
                by_products = (scale.mT @ by_matrix).view_as(products)
            else:
                by_products = (scale[..., None] * by_matrix[:, None]).view_as(products)
            by_weight = (maps @ by_products.mT).sum(dim=0)
            grad_x = grad_y @ matrix[:, :width].to(x.dtype).mT
            by_gram = None  # with its transpose: twice its symmetric part
            if squares is not None:
                by_scale = (products.flatten(2) @ by_matrix[..., None])[..., 0]  # (B, J)
                if met is not None and grad_grams is not None:
                    by_scale = by_scale + 2 * scale * (met * grad_grams).sum(dim=(2, 3)).mT
                by_energy = -(scale**3) * by_scale  # twice the slope of s by the square of 1 / s
                by_gram = (by_energy @ squares.flatten(1)).view_as(gram)
                by_weight.baddbmm_(weight, (by_energy.mT @ gram.flatten(1)).view_as(squares))
            if met is not None and grad_grams is not None:
                both = (grad_grams + grad_grams.mT) * scale.mT[..., None, None].square()
                left = (both.flatten(1, 2) @ weight).view(*both.shape[:3], -1)  # (J, B, p, d')
                by_weight += (left @ gram).sum(dim=1)
                own = weight.flatten(0, 1).mT @ left.transpose(0, 1).flatten(1, 2)
                by_gram = own if by_gram is None else by_gram + own
            if by_gram is not None:
                by_gram = by_gram if ctx.group is None else ctx.group.total(by_gram)
                grad_x.baddbmm_(x, by_gram[:, :width, :width].to(x.dtype))
                if ctx.has_ones:
                    grad_x += by_gram[:, -1:, :width].to(x.dtype)
        return grad_x, by_weight, weight @ by_products, total.sum(dim=0), None, None, None, None


def _token_gram(x: Tensor, count: Tensor | None) -> Tensor:
    """X^T X in float32 or better, (B, d', d'); with ``count`` (B,), X has a column of as many ones."""
    exact = exactly(x)
    gram = exact.mT @ exact
    if count is None:
        return gram
    total = exact.sum(dim=1)
    last = torch.cat([total, count.to(total.dtype)[:, None]], dim=1)
    return torch.cat([torch.cat([gram, total[:, None]], dim=1), last[..., None]], dim=2)


def _mode_grams(weight: Tensor, gram: Tensor) -> Tensor:
    """W_j X^T X W_j^T, (J, B, p, p), the sequences of a mode in one product."""
    right = gram @ weight.flatten(0, 1).mT  # (B, d', J p)
    right = right.unflatten(-1, weight.shape[:2]).permute(2, 1, 0, 3).flatten(2)  # (J, d', B p)
    return (weight @ right).unflatten(-1, (gram.size(0), -1)).transpose(1, 2)
