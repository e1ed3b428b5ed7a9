"""A call of RPC-Attention, and its steps between two attentions.

On a CPU the steps reuse memory. For accelerators each is one node of the graph. Automatic differentiation of
a clipping between two tensors is twelve operations, and of a whole step thirty; here it is nine.

Legend and recursion as in ``cpu.py``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernel_attention.core.engine import Unsupported
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings
from kernel_attention.mechanisms.softmax.functional import softmax_attention
from kernel_attention.tensors.padding import compaction, zero_padding
from kernel_attention.tensors.recompute import only_formulas
from kernel_attention.tensors.statistics import accumulation_dtype


class Heads(NamedTuple):
    """Keys, values and queries, (B, h, N, p); without queries the cleaned keys attend to themselves."""

    k: Tensor
    v: Tensor
    q: Tensor | None


class PursuitCall(NamedTuple):
    """The input x (B, N, d) and options of a call, and its heads once an engine is chosen.

    ``has_dropout``: whether weights of the last step are dropped. The settings are those of
    ``principal_attention_pursuit``.
    """

    x: Tensor
    head_dim: int
    settings: PursuitSettings
    has_dropout: bool
    heads: Heads | None = None

    def why_not(self) -> Unsupported | None:
        """The reason why no engine serves the call; None: some do."""
        return Unsupported("the faster forms have no dropout") if self.has_dropout else None


class Pulled(NamedTuple):
    """The gradients of a step by what goes into it; the first two are None in the first step."""

    d_low: Tensor | None  # L_{t-1}
    d_offset: Tensor | None  # E_{t-1}
    d_data: Tensor  # K, summed with the later steps'
    d_threshold: Tensor


def clean(
    data: Tensor, clipped: Tensor | None, low: Tensor | None, before: Tensor | None, threshold: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """T_t in ``dtype``, and C_t, from K, C_{t-1}, whose memory it may take, L_{t-1} and L_{t-2}.

    What does not exist in the first steps is None.
    """
    offset = None if clipped is None or low is None else _offset(clipped, low, before)
    clipped = _clip(_residual(data, offset), threshold)
    return _cleaned(clipped, offset, low).to(dtype), clipped


def following(
    data: Tensor, offset: Tensor | None, threshold: Tensor, low: Tensor, before: Tensor | None
) -> Tensor:
    """E_t from K, E_{t-1}, L_t and L_{t-1}."""
    return _offset(_clip(_residual(data, offset), threshold), low, before)


def clean_again(
    data: Tensor, offset: Tensor | None, low: Tensor | None, threshold: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """T_t from K, E_{t-1} and L_{t-1}, and what ``pull_back`` needs of the step.

    Here that is where the residual is cut off, as -1, 0, 1.
    """
    residual = _residual(data, offset)
    clipped = _clip(residual, threshold)
    cut = (residual - clipped if residual is data else residual.sub_(clipped)).sign_()
    return _cleaned(clipped, offset, low).to(dtype), cut


def pull_back(
    data: Tensor, threshold: Tensor, cut: Tensor, parts: Sequence[Tensor], d_offset: Tensor | None,
    d_data: Tensor | None, *, is_first: bool,
) -> Pulled:  # fmt: skip
    """The gradients of a step from those by T_t, the sum of the parts, and E_t, None after the last step.

    It may take their memory.
    """
    d_cleaned = parts[0] if len(parts) == 1 else parts[0].add_(parts[1])
    d_residual = d_cleaned.clone() if d_offset is None else d_cleaned + d_offset  # of C_t so far
    product = d_residual * cut
    d_threshold = product.sum_to_size(threshold.shape)
    d_residual.addcmul_(product, cut, value=-1)  # 0 where it is cut off, without a tensor of truth values
    del product
    d_low = None
    if is_first:
        d_offset = None
    else:
        d_low = -d_cleaned if d_offset is None else d_offset.sub_(d_cleaned)
        d_offset = d_residual.sub(d_cleaned, alpha=2)
        d_low.sub_(d_offset, alpha=2)
    return Pulled(d_low, d_offset, d_residual if d_data is None else d_data.add_(d_residual), d_threshold)


def _residual(data: Tensor, offset: Tensor | None) -> Tensor:
    """K + E_{t-1}; K itself before the first step."""
    return data if offset is None else data + offset


def _clip(residual: Tensor, threshold: Tensor) -> Tensor:
    """C_t from K + E_{t-1}, one bound at a time: with two tensors of bounds PyTorch has no vector loop."""
    return residual.clamp(max=threshold).clamp_(min=-threshold)


def _offset(clipped: Tensor, low: Tensor, before: Tensor | None) -> Tensor:
    """E_t from C_t, in its memory."""
    offset = clipped.sub_(low, alpha=2)
    return offset if before is None else offset.add_(before)


def _cleaned(clipped: Tensor, offset: Tensor | None, low: Tensor | None) -> Tensor:
    return clipped if offset is None or low is None else clipped.sub(offset, alpha=2).sub_(low)


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
