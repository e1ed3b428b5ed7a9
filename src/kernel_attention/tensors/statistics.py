"""Statistics of a padded sequence that no padded position can influence.

Masks are (B, N) bool with True = real token. A real token's *rank* is the number of real tokens before it,
so every function here gives a masked sequence what it would give the same tokens moved together.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit inputs, the input's own precision otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def without_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Inside the block, operations on x's device compute in the precision of their operands.

    PyTorch has no autocast on the device meta.
    """
    return nullcontext() if x.is_meta else torch.autocast(x.device.type, enabled=False)


def exactly(x: Tensor) -> Tensor:
    """x in the precision things accumulate in."""
    return x.to(accumulation_dtype(x.dtype))


def valid_ranks(attention_mask: Tensor) -> Tensor:
    """Rank of every position among the real tokens, (B, N) int64; a padded position has its predecessor's."""
    return attention_mask.cumsum(dim=1) - 1


def num_real(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """Real tokens of every sequence of x (B, N, d): (B,) int64."""
    if attention_mask is None:
        return torch.full((x.size(0),), x.size(1), device=x.device)
    return attention_mask.sum(dim=1)


def running_mean(
    x: Tensor, attention_mask: Tensor | None = None, before: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Mean over the real tokens of every prefix: x (B, h, N, p) -> (B, h, N, p).

    Accumulates in float32 for 16-bit inputs (Primal-Attention supplement, listing 1, lines 39-43).

    Args:
        x: tokens.
        attention_mask: (B, N), True = real token.
        before: of real tokens that lie before these, their sum (B, h, 1, p) and their number (B,).
    """
    total = x.to(accumulation_dtype(x.dtype))
    if attention_mask is None:
        count = torch.arange(1, x.size(2) + 1, device=x.device, dtype=total.dtype)[:, None]
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


def smallest(dtype: torch.dtype) -> float:
    """What is smaller counts as zero: its digits begin to go, and slopes of 1 / x leave the range."""
    precision = torch.finfo(accumulation_dtype(dtype))
    return precision.tiny / precision.eps


def divide(out: Tensor, weights: Tensor) -> Tensor:
    """The weighted sums over the weights' sums; 0 where nothing was seen."""
    # Neither the quotient nor its gradient exists where nothing was seen.
    exact = exactly(weights)
    return (out / exact.masked_fill(exact < smallest(exact.dtype), torch.inf)).to(out.dtype)
