"""The causal sum of linear attention by ``triton_kernels``, with a backward pass of its own.

It is an operator of PyTorch, into which a compiler does not look. An eager call takes the same functions
without the operator. Where the gradient itself is differentiated, it comes from the formula, which holds all
the weights.

Legend: B batch, h heads, N tokens, m features, w width of the values.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.tensors.affine import autocast
from kernel_attention.tensors.recompute import (
    differentiable_gradients,
    differentiable_leaves,
    eager_twin,
    needs_operator,
    only_formulas,
)
from kernel_attention.tensors.statistics import without_autocast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_LARGEST_WIDTH = 128


def causal_sums_by_kernels(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, *, with_totals: bool = False
) -> tuple[Tensor, Tensor | None]:
    """sum_{j <= i} (phi_q_i . phi_k_j) v_j in Triton, and the sums of the weights ``with_totals``.

    Products are in the precision of the input and accumulate in float32; those of float32 are exact unless
    PyTorch allows TF32.

    Args:
        phi_q: (B, h, N, m) in float32, bfloat16 or float16, m at most 128.
        phi_k: (B, h, N, m).
        v: (B, h, N, w), w at most 128.
        with_totals: whether the sums of the weights are wanted.

    Returns:
        (B, h, N, w), and (B, h, N, 1) in float32 or None.

    Raises:
        InputError: for another precision, more features or wider values, and where only the formulas will do.
    """
    if (lacking := only_formulas()) is not None:
        raise InputError(f"impl='triton': {lacking}; use impl='auto' or 'reference'")
    phi_q, phi_k, v = autocast(phi_q), autocast(phi_k), autocast(v)
    dtype = torch.promote_types(torch.promote_types(phi_q.dtype, phi_k.dtype), v.dtype)
    if dtype not in _DTYPES:
        raise InputError(f"impl='triton': x has dtype {dtype}, it takes float32, bfloat16 and float16")
    if max(phi_k.size(3), v.size(3)) > _LARGEST_WIDTH:
        raise InputError(
            f"impl='triton': {phi_k.size(3)} features and values of width {v.size(3)}, it takes up to "
            f"{_LARGEST_WIDTH}"
        )
    inputs = phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), with_totals
    out, totals = _sums(*inputs) if needs_operator(v) else _eager_sums(*inputs)
    return out.transpose(1, 2), totals[..., None] if with_totals else None


def _forward(phi_q: Tensor, phi_k: Tensor, v: Tensor, with_totals: bool) -> tuple[Tensor, Tensor]:
    """The sums (B, N, h, w) and those of the weights (B, h, N); empty where they are not wanted."""
    from kernel_attention.mechanisms.linear import triton_kernels  # only where its kernels are asked for

    with torch.cuda.device_of(v):
        out, totals = triton_kernels.causal_sums(
            _by_token(phi_q), _by_token(phi_k), _by_token(v), with_totals=with_totals
        )
    return out, v.new_empty(0, dtype=torch.float32) if totals is None else totals


def _gradients(
    grad: Tensor, grad_totals: Tensor | None, phi_q: Tensor, phi_k: Tensor, v: Tensor, needed: list[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """By phi_q, phi_k and v, (B, N, h, m or w); empty where not ``needed``."""
    from kernel_attention.mechanisms.linear.triton_kernels import causal_sums

    q, k, values, slope = _by_token(phi_q), _by_token(phi_k), _by_token(v), grad.to(v.dtype).contiguous()
    column = None if grad_totals is None else grad_totals.contiguous()
    by_q = by_k = by_v = None
    with torch.cuda.device_of(v):
        if needed[0]:
            by_q, _ = causal_sums(slope, values, k, column=column, column_of="a")
        if needed[1]:
            by_k, _ = causal_sums(values, slope, q, is_reversed=True, column=column, column_of="b")
        if needed[2]:
            by_v, _ = causal_sums(k, q, slope, is_reversed=True)
    found = (v.new_empty(0) if x is None else x for x in (by_q, by_k, by_v))
    return next(found), next(found), next(found)


def _by_token(x: Tensor) -> Tensor:
    """(B, h, N, p) -> (B, N, h, p), contiguous."""
    return x.transpose(1, 2).contiguous()


_sums = torch.library.custom_op("kernel_attention::linear_triton", _forward, mutates_args=())
_sums_backward = torch.library.custom_op(
    "kernel_attention::linear_triton_backward", _gradients, mutates_args=()
)


@_sums.register_fake
def _(phi_q: Tensor, phi_k: Tensor, v: Tensor, with_totals: bool) -> tuple[Tensor, Tensor]:
    sizes = v.shape[:3] if with_totals else (0,)
    return _empty_by_token(v), v.new_empty(sizes, dtype=torch.float32)


@_sums_backward.register_fake
def _(
    grad: Tensor, grad_totals: Tensor | None, phi_q: Tensor, phi_k: Tensor, v: Tensor, needed: list[bool]
) -> tuple[Tensor, ...]:
    found = zip((phi_q, phi_k, v), needed, strict=True)
    return tuple(_empty_by_token(x) if is_needed else v.new_empty(0) for x, is_needed in found)


def _empty_by_token(x: Tensor) -> Tensor:
    return x.new_empty(x.size(0), x.size(2), x.size(1), x.size(3))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    phi_q, phi_k, v, ctx.with_totals = inputs
    ctx.save_for_backward(phi_q, phi_k, v)
    ctx.set_materialize_grads(False)


def _pull_back(
    ctx: Any,
    grad: Tensor | None,
    grad_totals: Tensor | None,
    gradients: Callable[..., Any] = _sums_backward,
) -> tuple[Tensor | None, ...]:
    phi_q, phi_k, v = ctx.saved_tensors
    if not ctx.with_totals:
        grad_totals = None  # of an empty tensor
    if grad is None and grad_totals is None:
        return (None,) * 4
    needed = list(ctx.needs_input_grad[:3])
    with without_autocast(v):
        if torch.is_grad_enabled():
            leaves = differentiable_leaves((phi_q, phi_k, v), needed)
            outputs = _formula(*leaves)
            return *differentiable_gradients(outputs, leaves, needed, (grad, grad_totals)), None
        slope = v.new_zeros(_empty_by_token(v).shape) if grad is None else grad
        found = gradients(slope, grad_totals, phi_q, phi_k, v, needed)
    return *(
        x.transpose(1, 2) if is_needed else None for x, is_needed in zip(found, needed, strict=True)
    ), None


_sums.register_autograd(_pull_back, setup_context=_keep)


_eager_sums = eager_twin(_forward, _keep, partial(_pull_back, gradients=_gradients))


def _formula(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The results of the operator, from differentiable operations."""
    weights = (phi_q @ phi_k.mT).tril()
    return (weights @ v).transpose(1, 2), weights.sum(dim=3, dtype=torch.float32)
