"""The causal sum of linear attention by ``triton_kernels``, with a backward pass of its own.

Legend: B batch, h heads, N tokens, m features, w width of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.tensors.affine import autocast
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves, is_traced
from kernel_attention.tensors.statistics import without_autocast


def causal_sums_by_kernels(
    phi_q: Tensor, phi_k: Tensor, v: Tensor, *, with_totals: bool = False
) -> tuple[Tensor, Tensor | None]:
    """sum_{j <= i} (phi_q_i . phi_k_j) v_j in Triton, and the sums of the weights ``with_totals``.

    Products are in the precision of the input and accumulate in float32; those of float32 are exact unless
    PyTorch allows TF32. Where the gradient itself is differentiated, it comes from the formula, which holds
    all the weights.

    Args:
        phi_q: (B, h, N, m) in float32, bfloat16 or float16, m at most 128.
        phi_k: (B, h, N, m).
        v: (B, h, N, w), w at most 128.
        with_totals: whether the sums of the weights are wanted.

    Returns:
        (B, h, N, w), and (B, h, N, 1) in float32 or None.

    Raises:
        InputError: for another precision, more features or wider values, and in compiled, exported or
            transformed programs.
    """
    from kernel_attention.mechanisms.linear import triton_kernels  # only where its kernels are asked for

    if is_traced():
        raise InputError(
            "impl='triton' cannot be compiled, exported or transformed: use impl='auto' or 'reference'"
        )
    phi_q, phi_k, v = autocast(phi_q), autocast(phi_k), autocast(v)
    dtype = torch.promote_types(torch.promote_types(phi_q.dtype, phi_k.dtype), v.dtype)
    if dtype not in triton_kernels.DTYPES:
        raise InputError(f"impl='triton': x has dtype {dtype}, it takes float32, bfloat16 and float16")
    width = max(phi_k.size(3), v.size(3))
    if width > triton_kernels.LARGEST_WIDTH:
        raise InputError(
            f"impl='triton': {phi_k.size(3)} features and values of width {v.size(3)}, it takes up to "
            f"{triton_kernels.LARGEST_WIDTH}"
        )
    return _CausalSums.apply(phi_q.to(dtype), phi_k.to(dtype), v.to(dtype), with_totals)


class _CausalSums(torch.autograd.Function):
    """phi_q, phi_k and v -> the sums (B, h, N, w) and the sums of the weights (B, h, N, 1) or None."""

    @staticmethod
    def forward(
        ctx: Any, phi_q: Tensor, phi_k: Tensor, v: Tensor, with_totals: bool
    ) -> tuple[Tensor, Tensor | None]:
        from kernel_attention.mechanisms.linear import triton_kernels

        with torch.cuda.device_of(v):
            out, totals = triton_kernels.causal_sums(
                _by_token(phi_q), _by_token(phi_k), _by_token(v), with_totals=with_totals
            )
        ctx.save_for_backward(phi_q, phi_k, v)
        ctx.set_materialize_grads(False)
        return out.transpose(1, 2), None if totals is None else totals[..., None]

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_totals: Tensor | None) -> tuple[Tensor | None, ...]:
        from kernel_attention.mechanisms.linear.triton_kernels import causal_sums

        phi_q, phi_k, v = ctx.saved_tensors
        if grad is None and grad_totals is None:
            return (None,) * 4
        needed = ctx.needs_input_grad[:3]
        with without_autocast(v):
            if torch.is_grad_enabled():
                leaves = differentiable_leaves((phi_q, phi_k, v), needed)
                return *differentiable_gradients(_formula(*leaves), leaves, needed, (grad, grad_totals)), None
            q, k, values = _by_token(phi_q), _by_token(phi_k), _by_token(v)
            slope = torch.zeros_like(values) if grad is None else _by_token(grad.to(v.dtype))
            column = None if grad_totals is None else grad_totals.squeeze(3).contiguous()
            grads = (
                causal_sums(slope, values, k, column=column, column_of="a")[0] if needed[0] else None,
                causal_sums(values, slope, q, is_reversed=True, column=column, column_of="b")[0]
                if needed[1]
                else None,
                causal_sums(k, q, slope, is_reversed=True)[0] if needed[2] else None,
            )
        return *(None if found is None else found.transpose(1, 2) for found in grads), None


def _by_token(x: Tensor) -> Tensor:
    """(B, h, N, p) -> (B, N, h, p), contiguous."""
    return x.transpose(1, 2).contiguous()


def _formula(phi_q: Tensor, phi_k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The results of ``_CausalSums``, from differentiable operations."""
    weights = (phi_q @ phi_k.mT).tril()
    return weights @ v, weights.sum(dim=3, keepdim=True, dtype=torch.float32)
