"""Statistics of a padded sequence that do not depend on the padding.

Masks are (B, N) bool with True = real token. A real token's *rank* is the number of real tokens before it,
so every function here gives a masked sequence the same result as its real tokens moved together.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from kernel_attention.tensors.constants import kept_constant


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit inputs, the input's own precision otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inside the block, operations on x's device compute in the precision of their operands.

    PyTorch has no autocast on the device meta.
    """
    is_on = not x.is_meta and torch.is_autocast_enabled(x.device.type)
    return torch.autocast(x.device.type, enabled=False) if is_on else nullcontext()


def exactly(x: Tensor) -> Tensor:
    """x in the precision that sums accumulate in."""
    return x.to(accumulation_dtype(x.dtype))


def valid_ranks(attention_mask: Tensor) -> Tensor:
    """Rank of every position among the real tokens, (B, N) int64; a padded one has its predecessor's."""
    return attention_mask.cumsum(dim=1) - 1


def token_ranks(length: int, attention_mask: Tensor | None, device: torch.device) -> Tensor:
    """Rank of every token among the real ones for all heads, (B or 1, 1, N) int64."""
    if attention_mask is None:
        return torch.arange(length, device=device)[None, None]
    return valid_ranks(attention_mask)[:, None]


def num_real(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Real tokens of every sequence of x (B, N, d): (B,) int64."""
    if attention_mask is None:
        return torch.full((x.size(0),), x.size(1), device=x.device)
    return attention_mask.sum(dim=1)


def numbers_to(count: int, like: Tensor) -> Tensor:
    """1, 2, .., count as a column, (count, 1), of the precision of ``like``; a constant."""

    def make() -> Tensor:
        return torch.arange(1, count + 1, device=like.device, dtype=like.dtype)[:, None]

    return kept_constant(("numbers", count, like.dtype), like, make)


def running_mean(
    x: Tensor, attention_mask: Tensor | None = None, before: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Mean over the real tokens of every prefix: x (B, h, N, p) -> (B, h, N, p).

    Accumulates in float32 for 16-bit inputs (Primal-Attention supplement, listing 1, lines 39-43).

    Args:
        x: tokens.
        attention_mask: (B, N), True = real token.
        before: the sum (B, h, 1, p) and the number (B,) of the real tokens that lie before these.
    """
    total = x.to(accumulation_dtype(x.dtype))
    if attention_mask is None:
        count = numbers_to(x.size(2), total)
    else:
        total = total.masked_fill(~attention_mask[:, None, :, None], 0.0)
        count = attention_mask.cumsum(dim=1).clamp_min(1).to(total.dtype)[:, None, :, None]
    total = total.cumsum(dim=2)
    if before is not None:
        total = total + before[0]
        earlier = before[1].to(total.dtype)[:, None, None, None]
        if attention_mask is None:
            count = count + earlier
        else:
            count = (attention_mask.cumsum(dim=1)[:, None, :, None] + earlier).clamp_min(1)
    return (total / count).to(x.dtype)


def mean_or_zero(x: Tensor) -> Tensor:
    """The mean of all numbers of x; 0 of none, as of the objectives of no sequences."""
    if x.dim() == 0:
        return x
    return x.mean() if x.numel() > 0 else x.sum()


def smallest(dtype: torch.dtype) -> float:
    """The smallest number that counts as non-zero: below it digits are lost, and slopes of 1 / x overflow."""
    precision = torch.finfo(accumulation_dtype(dtype))
    return precision.tiny / precision.eps


def divide(out: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums divided by the sums of the weights; 0 where the weights sum to 0."""
    # There neither the quotient nor its gradient exists.
    exact = exactly(weights)
    return (out / exact.masked_fill(exact < smallest(exact.dtype), torch.inf)).to(out.dtype)


def shrink(x: Tensor, threshold: Tensor) -> Tensor:
    """Soft thresholding sgn(x) max(|x| - threshold, 0), the proximal operator of the 1-norm.

    Args:
        x: any shape.
        threshold: at least 0, broadcast against x; a gradient flows to it wherever the result is not zero.

    Returns:
        The shape of x; exactly zero where |x| <= threshold.
    """
    return x - x.clamp(-threshold, threshold)
