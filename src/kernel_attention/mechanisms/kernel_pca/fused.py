"""RPC-Attention by ``triton_kernels``: the same recursion, one launch a step and a backward pass of its own.

Legend: B batch, h heads, N tokens, p head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.mechanisms.kernel_pca.functional import Convention, pursuit_steps, pursuit_threshold
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves
from kernel_attention.tensors.statistics import without_autocast


class _Call(NamedTuple):
    """What is not differentiated."""

    iterations: int
    mask: Tensor | None
    is_causal: bool


def rpc_attention_by_kernels(
    k: Tensor,
    v: Tensor,
    *,
    q: Tensor | None = None,
    iterations: int = 4,
    lam: float = 4.0,
    convention: Convention = "released",
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """``rpc_attention`` in Triton, with zeros at padded tokens.

    It keeps L of every step, and computes the rest of the recursion again in the backward pass. Products are
    in the precision of the input and accumulate in float32; those of float32 are exact unless PyTorch allows
    TF32. Where the gradient itself is differentiated, it comes from the formulas.

    Args:
        k: keys, (B, h, N, p) in float32, bfloat16 or float16, p at most 128.
        v: values, (B, h, N, p).
        q: queries, (B, h, N, p); None: the cleaned keys attend to themselves.
        iterations: n.
        lam: lambda.
        convention: which threshold to use.
        attention_mask: (B, N), True = real token.
        is_causal: row i reads rows 0..i only.

    Raises:
        InputError: for another precision, or wider heads.
    """
    from kernel_attention.mechanisms.kernel_pca import triton_kernels  # only where its kernels are asked for

    if k.dtype not in triton_kernels.DTYPES:
        raise InputError(f"impl='triton': x has dtype {k.dtype}, it takes float32, bfloat16 and float16")
    if k.size(3) > triton_kernels.LARGEST_HEAD:
        raise InputError(f"impl='triton': head width {k.size(3)} exceeds {triton_kernels.LARGEST_HEAD}")
    threshold = pursuit_threshold(
        k, lam, convention=convention, attention_mask=attention_mask, is_causal=is_causal
    )
    call = _Call(iterations, attention_mask, is_causal)
    return _Pursuit.apply(q, k, v, threshold, call)


class _Pursuit(torch.autograd.Function):
    """Queries or None, keys, values and the threshold -> L_n, all (B, h, N, p) and tau (B, h, 1 or N, 1)."""

    @staticmethod
    def forward(ctx: Any, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, call: _Call) -> Tensor:
        from kernel_attention.mechanisms.kernel_pca import triton_kernels

        with torch.cuda.device_of(k):
            pursuit = triton_kernels.pursue(
                *_arguments(q, k, v, threshold, call), iterations=call.iterations, is_causal=call.is_causal,
                keep=any(ctx.needs_input_grad),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, threshold, *pursuit)
        ctx.call = call
        return pursuit.low_rank.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from kernel_attention.mechanisms.kernel_pca import triton_kernels

        q, k, v, threshold, *kept = ctx.saved_tensors
        call: _Call = ctx.call
        with without_autocast(k):
            if torch.is_grad_enabled():
                needed = ctx.needs_input_grad[:4]
                leaves = differentiable_leaves((q, k, v, threshold), needed)
                outputs = (_formulas(call, *leaves),)
                return *differentiable_gradients(outputs, leaves, needed, (grad,)), None
            found = triton_kernels.pull_back(
                _by_token(grad.to(k.dtype), call.mask), triton_kernels.KeptSteps(*kept),
                *_arguments(q, k, v, threshold, call), is_causal=call.is_causal,
            )  # fmt: skip
        by_row = found.threshold[..., None]
        return (
            None if q is None or found.queries is None else found.queries.transpose(1, 2).to(q.dtype),
            found.data.transpose(1, 2).to(k.dtype),
            found.values.transpose(1, 2).to(v.dtype),
            by_row if call.is_causal else by_row.sum(dim=2, keepdim=True),
            None,
        )


def _arguments(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, call: _Call
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, data, values, threshold and mask as the kernels read them."""
    queries = None if q is None else _by_token(q, call.mask)
    mask = None if call.mask is None else call.mask.to(torch.uint8).contiguous()
    return queries, _by_token(k, call.mask), _by_token(v, call.mask), threshold.flatten(2).contiguous(), mask


def _by_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, h, N, p) -> (B, N, h, p), contiguous, zero at padded tokens."""
    x = x.transpose(1, 2)
    return x.contiguous() if mask is None else x.masked_fill(~mask[..., None, None], 0.0).contiguous()


def _formulas(call: _Call, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor) -> Tensor:
    """The output of ``_Pursuit``, from differentiable operations."""
    out = pursuit_steps(
        k, v, threshold, q=q, iterations=call.iterations, attention_mask=call.mask, is_causal=call.is_causal
    ).low_rank
    return out if call.mask is None else out.masked_fill(~call.mask[:, None, :, None], 0.0)
