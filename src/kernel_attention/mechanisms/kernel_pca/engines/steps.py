"""RPC-Attention in few launches, for accelerators: each step between two attentions is one node of the graph.

Automatic differentiation of a clipping between two tensors is twelve operations, and of a whole step thirty.
Here it is nine. Legend and recursion as in ``cpu.py``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings
from kernel_attention.mechanisms.softmax.functional import softmax_attention
from kernel_attention.tensors.padding import compaction, zero_padding
from kernel_attention.tensors.recompute import only_formulas
from kernel_attention.tensors.statistics import accumulation_dtype


def has_few_launches(k: Tensor) -> bool:
    """True where ``pursuit_in_few_launches`` saves some."""
    is_eager = not torch.compiler.is_compiling() and only_formulas() is None
    return k.device.type != "cpu" and type(k) is Tensor and k.size(0) > 0 and is_eager


def pursuit_in_few_launches(
    k: Tensor, v: Tensor, settings: PursuitSettings, *, q: Tensor | None, dropout_p: float
) -> Tensor:
    """``rpc_attention`` of keys, values and queries; causal padded rows are zero."""
    iterations, _, _, mask, is_causal = settings
    if is_causal and mask is not None:
        # Right padding lies in the future of all real tokens, so that no step needs a mask.
        moved = compaction(mask)

        def placed(x: Tensor) -> Tensor:
            x = zero_padding(x, mask)
            return x if moved is None else moved.apply(x)

        k, v, q = placed(k), placed(v), None if q is None else placed(q)
        alone = settings._replace(attention_mask=None)
        found = pursuit_in_few_launches(k, v, alone, q=q, dropout_p=dropout_p)
        return zero_padding(found if moved is None else moved.undo(found), mask)
    data = zero_padding(k.to(accumulation_dtype(k.dtype)), mask)
    threshold = settings.threshold(k)
    lowest = -threshold
    low: Tensor | None = None
    before: Tensor | None = None
    clipped: Tensor | None = None
    for step in range(iterations):
        if low is None:
            clipped = cleaned = _Clipped.apply(data, threshold, lowest)
        else:
            cleaned, clipped = _Step.apply(data, threshold, lowest, clipped, low, before)
        keys, before = cleaned.to(v.dtype), low
        low = softmax_attention(
            keys if q is None else q, keys, v, attention_mask=mask, is_causal=is_causal,
            dropout_p=dropout_p if step == iterations - 1 else 0.0,
        )  # fmt: skip
    assert low is not None
    return low


def _clip_back(saved: tuple[Tensor, ...], grad: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of a clipping by its input and by tau; saved are the input, the result and tau."""
    residual, clipped, threshold = saved
    cut = (residual - clipped).sign()  # where and on which side it cuts off
    product = grad * cut
    return torch.addcmul(grad, product, cut, value=-1), product.sum_to_size(threshold.shape)


class _Clipped(torch.autograd.Function):
    """C_1 = T_1 from K, tau and -tau, a constant here; its gradient is differentiable."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, threshold: Tensor, lowest: Tensor) -> Tensor:
        clipped = torch.clamp(data, lowest, threshold)
        ctx.save_for_backward(data, clipped, threshold)
        return clipped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return *_clip_back(ctx.saved_tensors, grads[0]), None


class _Step(torch.autograd.Function):
    """T_t and C_t from K, tau, -tau, C_{t-1}, L_{t-1} and L_{t-2}; its gradient is differentiable."""

    @staticmethod
    def forward(
        ctx: Any, data: Tensor, threshold: Tensor, lowest: Tensor, clipped: Tensor, low: Tensor,
        before: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.has_before = before is not None
        offset = torch.sub(clipped, low, alpha=2)
        offset = offset if before is None else offset.add_(before)
        residual = data + offset
        clipped = torch.clamp(residual, lowest, threshold)
        ctx.save_for_backward(residual, clipped, threshold)
        return torch.sub(clipped, offset, alpha=2).sub_(low), clipped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        d_cleaned, d_clipped = grads
        if d_cleaned is None:
            return (None,) * 6
        # C = clip(K + E), T = C - 2 E - L, E = C' - 2 L + L'
        total = d_cleaned if d_clipped is None else d_cleaned + d_clipped
        d_residual, d_threshold = _clip_back(ctx.saved_tensors, total)
        d_offset = torch.sub(d_residual, d_cleaned, alpha=2)
        d_low = torch.add(d_cleaned, d_offset, alpha=2).neg()
        return d_residual, d_threshold, None, d_offset, d_low, d_offset if ctx.has_before else None
