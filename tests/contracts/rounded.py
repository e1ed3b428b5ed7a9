"""Monte Carlo arithmetic: float64 in which every operation is rounded at random, to as few digits as asked.

Parker, "Monte Carlo arithmetic", 1997. The spread of a few such runs around the exact one says what the
roundings of an arithmetic with unit roundoff u do to a result: u times the condition of the computation,
without a line of analysis for each mechanism. Forward and backward passes are rounded alike.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from kernel_attention.tensors.softmax import attention as op

# Sums of products round inside: there the operands are moved as well, by which a sum that cancels is off by u
# times the sum of its absolute terms.
_SUMS = (
    "mm", "bmm", "addmm", "addbmm", "baddbmm", "dot", "mv", "sum", "mean", "cumsum", "linalg_vector_norm",
    "convolution", "convolution_backward", "_softmax_backward_data",
)  # fmt: skip
# What only moves, chooses or compares numbers rounds nothing.
_EXACT = frozenset((
    "_to_copy", "_unsafe_view", "abs", "amax", "amin", "arange", "cat", "clamp", "clamp_max",
    "clamp_min", "clone", "constant_pad_nd", "copy", "diag_embed", "diagonal_backward", "empty",
    "empty_like", "empty_permuted", "empty_strided", "eye", "fill", "flip", "full", "full_like",
    "gather", "gt", "index", "index_select", "masked_fill", "max", "maximum", "min", "minimum", "neg",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "relu",
    "repeat", "scalar_tensor", "select_backward", "sgn", "sign", "slice_backward", "sort", "stack",
    "threshold_backward", "topk", "tril", "triu", "where", "zero", "zeros", "zeros_like",
))  # fmt: skip


def _softmax_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """The steps of PyTorch's fused kernel, forward."""
    logits = _logits(q, k, mask, is_causal, scale)
    lse = logits.logsumexp(dim=-1)
    weights = logits.softmax(dim=-1)
    return torch.where(lse[..., None] > -torch.inf, weights, 0.0) @ v, lse


def _softmax_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: Tensor | None,
    is_causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The steps of the fused kernel, backward; above float32's limit our own, which are in float64."""
    if op._largest_logit(q, k, scale) > torch.finfo(torch.float32).eps ** -0.5:
        with _disable_current_modes():
            grads = op._by_slices(grad, q, k, v, mask, is_causal, scale)
        return tuple(x * 1.0 for x in grads)  # rounded to float32 once
    lse = lse.masked_fill(lse == -torch.inf, torch.inf)
    weights = (_logits(q, k, mask, is_causal, scale) - lse[..., None]).exp()
    change = weights * (grad @ v.mT - (grad * out).sum(dim=-1, keepdim=True))
    return change @ k * scale, change.mT @ q * scale, weights.mT @ grad


def _logits(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    logits = q @ k.mT * scale
    if mask is not None:
        logits = logits.masked_fill(mask == -torch.inf, -torch.inf)
    if is_causal:
        future = torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1)
        logits = logits.masked_fill(future, -torch.inf)
    return logits


_UNFOLDED = {
    "softmax_attention": _softmax_attention,
    "softmax_attention_backward": _softmax_attention_backward,
}


class RoundedArithmetic(TorchDispatchMode):
    """Within it every floating-point operation is off by a normal error of relative size ``unit``.

    Args:
        unit: u; 2^-24 is float32's.
        seed: of the errors.
    """

    def __init__(self, unit: float, seed: int) -> None:
        super().__init__()
        self.unit = unit
        self.generator = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func._schema.name.partition("::")[2]
        if name in _UNFOLDED:
            with self:
                return _UNFOLDED[name](*args)
        if name in _SUMS:
            args = tree_map_only(Tensor, self._rounded, args)
        out = func(*args, **(kwargs or {}))
        if name in _EXACT or any(returned.alias_info for returned in func._schema.returns):
            return out  # a view, or written in place
        return tree_map_only(Tensor, self._rounded, out)

    def _rounded(self, x: Tensor) -> Tensor:
        if not x.is_floating_point():
            return x
        error = torch.randn(x.shape, generator=self.generator, dtype=x.dtype)
        return x * (1 + self.unit * error)


def spread(run: Callable[[], list[Tensor]], exact: list[Tensor], *, unit: float, draws: int) -> list[float]:
    """How far rounding moves each result of ``run``: the largest distance from ``exact`` in so many draws."""
    far = [0.0] * len(exact)
    for seed in range(draws):
        with RoundedArithmetic(unit, seed):
            rounded = run()
        far = [max(old, (new - x).norm().item()) for old, new, x in zip(far, rounded, exact, strict=True)]
    return far
