"""RPC-Attention by ``triton_kernels``: the same recursion, one launch a step and a backward pass of its own.

Legend: B batch, h heads, N tokens, p head width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings, pursuit_gradients
from kernel_attention.tensors.padding import zero_padding
from kernel_attention.tensors.statistics import without_autocast


def rpc_attention_by_kernels(
    k: Tensor, v: Tensor, settings: PursuitSettings, *, q: Tensor | None = None
) -> Tensor:
    """``rpc_attention`` in Triton, with zeros at padded tokens.

    It keeps L of every step, and computes the rest of the recursion again in the backward pass. Products are
    in the precision of the input and accumulate in float32; those of float32 are exact unless PyTorch allows
    TF32. Where the gradient itself is differentiated, it comes from the formulas.

    Args:
        k: keys, (B, h, N, p) in float32, bfloat16 or float16, p at most 128.
        v: values, (B, h, N, p).
        settings: as of ``principal_attention_pursuit``.
        q: queries, (B, h, N, p); None: the cleaned keys attend to themselves.

    Raises:
        InputError: for another precision, or wider heads.
    """
    from kernel_attention.mechanisms.kernel_pca import triton_kernels  # only where its kernels are asked for

    if k.dtype not in triton_kernels.DTYPES:
        raise InputError(f"impl='triton': x has dtype {k.dtype}, it takes float32, bfloat16 and float16")
    if k.size(3) > triton_kernels.LARGEST_HEAD:
        raise InputError(f"impl='triton': head width {k.size(3)} exceeds {triton_kernels.LARGEST_HEAD}")
    return _Pursuit.apply(q, k, v, settings.threshold(k), settings)


class _Pursuit(torch.autograd.Function):
    """Queries or None, keys, values and the threshold -> L_n, all (B, h, N, p) and tau (B, h, 1 or N, 1)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, settings: PursuitSettings
    ) -> Tensor:
        from kernel_attention.mechanisms.kernel_pca import triton_kernels

        with torch.cuda.device_of(k):
            pursuit = triton_kernels.pursue(
                *_arguments(q, k, v, threshold, settings.attention_mask), iterations=settings.iterations,
                is_causal=settings.is_causal, keep=any(ctx.needs_input_grad),
            )  # fmt: skip
        ctx.save_for_backward(q, k, v, threshold, *pursuit)
        ctx.settings = settings
        return pursuit.low_rank.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        from kernel_attention.mechanisms.kernel_pca import triton_kernels

        q, k, v, threshold, *kept = ctx.saved_tensors
        settings: PursuitSettings = ctx.settings
        mask = settings.attention_mask
        with without_autocast(k):
            if torch.is_grad_enabled():
                by_formulas = pursuit_gradients(
                    (q, k, v, threshold), ctx.needs_input_grad[:4], zero_padding(grad, mask),
                    iterations=settings.iterations, attention_mask=mask, is_causal=settings.is_causal,
                )  # fmt: skip
                return *by_formulas, None
            found = triton_kernels.pull_back(
                _by_token(grad.to(k.dtype), mask), triton_kernels.KeptSteps(*kept),
                *_arguments(q, k, v, threshold, mask), is_causal=settings.is_causal,
            )  # fmt: skip
        by_row = found.threshold[..., None]
        return (
            None if q is None or found.queries is None else found.queries.transpose(1, 2).to(q.dtype),
            found.data.transpose(1, 2).to(k.dtype),
            found.values.transpose(1, 2).to(v.dtype),
            by_row if settings.is_causal else by_row.sum(dim=2, keepdim=True),
            None,
        )


def _arguments(
    q: Tensor | None, k: Tensor, v: Tensor, threshold: Tensor, mask: Tensor | None
) -> tuple[Tensor | None, Tensor, Tensor, Tensor, Tensor | None]:
    """Queries, data, values, threshold and mask as the kernels read them."""
    queries = None if q is None else _by_token(q, mask)
    numbers = None if mask is None else mask.to(torch.uint8).contiguous()
    return queries, _by_token(k, mask), _by_token(v, mask), threshold.flatten(2).contiguous(), numbers


def _by_token(x: Tensor, mask: Tensor | None) -> Tensor:
    """(B, h, N, p) -> (B, N, h, p), contiguous, zero at padded tokens."""
    return zero_padding(x, mask).transpose(1, 2).contiguous()
