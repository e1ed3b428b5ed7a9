"""Rows divided by their norms, at any size that a number may have.

The squares of small and of large rows leave the range of their precision. The formula divides a row by its
largest entry first, which costs three times as much as the norm alone. On CPUs the rows are asked whether any
of them needs that, and a backward pass by hand reads the input and the norms once.

Legend: p width of a row.
"""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    needs_operator,
    only_formulas,
)
from kernel_attention.tensors.statistics import accumulation_dtype, exactly, smallest


def unit_rows(x: Tensor) -> Tensor:
    """x / ||x|| for every row of x (..., p); a zero row stays zero and passes no gradient.

    The norm accumulates in float32 for 16-bit inputs, and its squares do not overflow.
    """
    if x.device.type != "cpu":
        is_eager = not torch.compiler.is_compiling() and not only_formulas()
        return _WideUnitRows.apply(x) if is_eager else _formula(x)
    if x.numel() == 0 or needs_operator(x) or only_formulas():
        return _formula(x)
    return _UnitRows.apply(x)


def wide_norms(rows: Tensor, dims: tuple[int, ...] = (-1,)) -> Tensor:
    """||row|| without a question to the host, in float64 or, on devices without, in float32: (..., 1).

    A row extends over ``dims``. Its norm is infinite where it is zero. float64 holds the squares of all
    narrower numbers; rows of the precision of the norm are divided by their largest entry first.
    """
    exact = torch.float64 if rows.device.type != "mps" else torch.float32
    norm = functools.partial(torch.linalg.vector_norm, dim=dims, keepdim=True, dtype=exact)
    if exact == torch.float64 and rows.dtype != exact:
        return torch.threshold_(norm(rows), smallest(rows.dtype), math.inf)
    size = torch.threshold_(norm(rows, math.inf), smallest(rows.dtype), 1.0)
    return torch.threshold_(norm(rows / size).mul_(size), smallest(rows.dtype), math.inf)


def inverse_norms(rows: Tensor, *, ignored: Tensor | None = None, spare: Tensor | None = None) -> Tensor:
    """1 / ||row|| in float32 or better, (..., 1); 0 for a zero row.

    Args:
        rows: (..., p), with at least one row.
        ignored: (..., 1) bool, rows whose result is any number.
        spare: a buffer of the shape and precision of ``rows``.
    """
    exact = accumulation_dtype(rows.dtype)
    norm = torch.linalg.vector_norm(rows, dim=-1, keepdim=True, dtype=exact)
    if ignored is not None:
        norm.masked_fill_(ignored, 1.0)
    limits = torch.finfo(exact)
    safe = math.sqrt(limits.tiny / limits.eps)  # from here on no square of weight is lost
    if norm.device.type == "cpu":  # elsewhere the question would wait for the device
        low, high = torch.aminmax(norm)
        if low > safe and high < math.inf:
            return norm.reciprocal_()
    # A token's own norm decides for it: what other tokens hold must not change a bit of its output.
    largest = torch.abs(rows, out=spare).amax(dim=-1, keepdim=True).to(exact)
    scale = torch.threshold_(largest, smallest(exact), math.inf).reciprocal_()
    balanced = torch.mul(rows, scale, out=spare)
    size = torch.linalg.vector_norm(balanced, dim=-1, keepdim=True, dtype=exact)
    scale.div_(size.masked_fill_(size == 0, 1.0))
    return torch.where((norm > safe) & (norm < math.inf), norm.reciprocal(), scale)


def _formula(x: Tensor) -> Tensor:
    exact = exactly(x)
    largest = exact.detach().abs().amax(dim=-1, keepdim=True)
    # Dividing by a clamped norm would give a zero row a huge slope.
    scaled = exact / largest.masked_fill(largest < smallest(exact.dtype), torch.inf)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return (scaled / norm.masked_fill(norm == 0, torch.inf)).to(x.dtype)


class _WideUnitRows(torch.autograd.Function):
    """In three launches and four: an accelerator would wait for an answer, and pays for every operation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        norm = wide_norms(x)
        unit = torch.div(x, norm, out=torch.empty_like(x))
        ctx.save_for_backward(x, unit, norm)
        return unit

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        x, unit, norm = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((x,), (True,))
            return differentiable_gradients([_formula(leaves[0])], leaves, (True,), [grad])[0]
        return unit_rows_back(unit, norm, grad, torch.empty_like(x))


def unit_rows_back(unit: Tensor, norm: Tensor, grad: Tensor, out: Tensor) -> Tensor:
    """The gradient of rows from that of the unit rows, in ``out``; ``norm`` as from ``wide_norms``."""
    along = (unit * grad).sum(dim=-1, keepdim=True, dtype=accumulation_dtype(unit.dtype))
    # d(x / |x|) = (dx - u <u, dx>) / |x|, u = x / |x|
    return torch.div(torch.addcmul(grad, unit, along.to(grad.dtype), value=-1), norm, out=out)


class _UnitRows(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formula."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        scale = inverse_norms(x)
        ctx.save_for_backward(x, scale)
        return (x * scale).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor | None:
        x, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((x,), (True,))
            return differentiable_gradients([_formula(leaves[0])], leaves, (True,), [grad])[0]
        unit, exact = x * scale, exactly(grad)
        along = (unit * exact).sum(dim=-1, keepdim=True)
        # d(x / |x|) = (dx - u <u, dx>) / |x|, u = x / |x|
        return torch.addcmul(exact, unit, along, value=-1).mul_(scale).to(x.dtype)


def unit_by_head(z: Tensor, dims: tuple[int, ...] | None) -> Tensor:
    """z (B, N, D, h, p) over its norms, by heads, (h, B, N, D, p); without ``dims`` z itself.

    In few launches, for accelerators; ``dims`` are those that the norms sum over.
    """
    return _UnitByHead.apply(z, dims)


class _UnitByHead(torch.autograd.Function):
    """Where the gradient itself is differentiated, it comes from the formula."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, dims: tuple[int, ...] | None) -> Tensor:
        ctx.dims = dims
        batch, length, order, heads, size = z.shape
        features, norm = z.new_empty(heads, batch, length, order, size), None
        if dims is None:
            features.permute(1, 2, 3, 0, 4).copy_(z)
        else:
            norm = wide_norms(z, dims)
            torch.div(z, norm, out=features.permute(1, 2, 3, 0, 4))
        ctx.save_for_backward(z, features, norm)
        return features

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None]:
        z, features, norm = ctx.saved_tensors
        grad, features = (each.permute(1, 2, 3, 0, 4) for each in (grads[0], features))
        if norm is None:
            return grad.contiguous(), None
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((z,), (True,))
            size = torch.linalg.vector_norm(leaves[0], dim=ctx.dims, keepdim=True)
            unit = leaves[0] / size.masked_fill(norm.isinf(), torch.inf)
            return differentiable_gradients([unit], leaves, (True,), [grad])[0], None
        # d(x / |x|) = (dx - u <u, dx>) / |x|, u = x / |x|
        along = (features * grad).sum(dim=ctx.dims, keepdim=True, dtype=accumulation_dtype(z.dtype))
        slope = torch.addcmul(grad, features, along.to(z.dtype), value=-1)
        return torch.div(slope, norm, out=torch.empty_like(z)), None
