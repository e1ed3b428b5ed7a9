"""Affine maps, as weight and bias, for functions that multiply them together; several in one product."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_gradient,
)
from kernel_attention.tensors.statistics import exactly

_HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None
_COMPILES_WIDE_PRODUCT = TorchVersion(torch.__version__) >= "2.10"

Affine = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,) or None."""


def apply_affine(x: Tensor, parameters: Affine) -> Tensor:
    """x W^T + b in the precision of x."""
    weight, bias = parameters
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of products with x: that of autocast, or x's own where autocast is off.

    Autocast leaves float64 alone.
    """
    device = x.device.type
    if x.dtype == torch.float64:
        return x.dtype
    is_on = not x.is_meta and torch.is_autocast_enabled(device)  # PyTorch has none for meta tensors
    return torch.get_autocast_dtype(device) if is_on else x.dtype


def autocast(x: Tensor) -> Tensor:
    """x in the precision that autocast gives to products; x itself where autocast is off."""
    return x.to(product_dtype(x))


def wide(x: Tensor) -> Tensor:
    """x in the precision of products with it, and in float32 where that is float16.

    A sum over the tokens, or a number over a small variance, leaves the range of float16. bfloat16 has the
    range of float32.
    """
    dtype = product_dtype(x)
    return x.to(torch.float32 if dtype == torch.float16 else dtype)


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (batch, m, k) and (batch, k, n), which accumulates and stays in float32 or better.

    CUDA has such a product of 16-bit matrices. It is not differentiated, and fails in torch 2.9.0 where a
    compiler, and in others where ``FlopCounterMode``, looks on.
    """
    if _has_wide_product(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(exactly(a), exactly(b))


def _has_wide_product(a: Tensor, b: Tensor) -> bool:
    is_short = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    if not (is_short and _HAS_WIDE_PRODUCT and (a.is_cuda or a.is_meta)) or needs_gradient(a, b):
        return False
    if torch.compiler.is_compiling():
        return _COMPILES_WIDE_PRODUCT
    if torch._C._len_torch_dispatch_stack() == 0:
        return True
    return not any("FlopCounter" in type(mode).__name__ for mode in _get_current_dispatch_mode_stack())


def joint_affine(x: Tensor, maps: Sequence[Affine]) -> Tensor:
    """Several affine maps of the same tokens side by side; all of them have a bias, or none.

    The weights are copied once, and there is one product each for the outputs, for the gradient of the tokens
    and for those of the weights: on accelerators every launch counts.
    """
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
