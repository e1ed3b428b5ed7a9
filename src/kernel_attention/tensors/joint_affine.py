"""Several affine maps of the same tokens in one product, for accelerators, where every launch counts.

The weights and biases lie side by side after one copy, and there is one product each for the outputs, for the
gradient of the tokens and for those of the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from kernel_attention.tensors.affine import Affine, product_dtype
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves


def joint_affine(x: Tensor, maps: Sequence[Affine]) -> Tensor:
    """The same of weights and biases; all of the maps have a bias, or none."""
    biases = [bias for _, bias in maps if bias is not None]
    return _JointLinear.apply(x, len(maps), *(weight for weight, _ in maps), *biases)


def _formula(x: Tensor, count: int, *parameters: Tensor) -> Tensor:
    bias = torch.cat(parameters[count:]) if len(parameters) > count else None
    return linear(x, torch.cat(parameters[:count]), bias)


class _JointLinear(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor) -> Tensor:
        dtype = product_dtype(x)
        flat = torch.cat([each.reshape(-1) for each in parameters]).to(dtype)
        rows = sum(each.size(0) for each in parameters[:count])
        weight = flat[: rows * x.size(-1)].view(rows, x.size(-1))
        bias = flat[weight.numel() :] if len(parameters) > count else None
        ctx.count = count
        ctx.save_for_backward(x, weight, *parameters)
        return linear(x.to(dtype), weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *parameters = ctx.saved_tensors
        needed = ctx.needs_input_grad[0], *ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((x, *parameters), needed)
            y = _formula(leaves[0], ctx.count, *leaves[1:])
            dx, *found = differentiable_gradients([y], leaves, needed, [grad])
            return dx, None, *found
        return _joint_gradients(x, weight, parameters, ctx.count, grad, needed)


def _joint_gradients(
    x: Tensor, weight: Tensor, parameters: Sequence[Tensor], count: int, grad: Tensor,
    needed: Sequence[bool],
) -> tuple[Tensor | None, ...]:  # fmt: skip
    rows = grad.reshape(-1, grad.size(-1))
    dx = (rows @ weight).view(x.shape).to(x.dtype) if needed[0] else None
    sizes = [each.size(0) for each in parameters[:count]]
    found: list[Tensor | None] = [None] * len(parameters)
    if any(needed[1 : 1 + count]):
        dw = (rows.mT @ x.reshape(-1, x.size(-1)).to(rows.dtype)).to(parameters[0].dtype)
        found[:count] = dw.split(sizes)
    if any(needed[1 + count :]):
        found[count:] = rows.sum(dim=0, dtype=parameters[0].dtype).split(sizes)
    return dx, None, *found
