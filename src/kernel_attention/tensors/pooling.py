"""Downsampling a sequence by a factor: average, maximum, or a learnt strided convolution of every block.

The last block of a sequence may be partial; it is pooled over the tokens it has. The average, and a
convolution whose weights are 1 / factor, pool equal tokens to the same token, whatever their number.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.padding import in_blocks
from kernel_attention.tensors.recompute import is_for_all_sizes
from kernel_attention.tensors.statistics import accumulation_dtype, numbers_to

Pooling = Literal["average", "max", "conv"]


def pool(
    x: Tensor,
    factor: int,
    mode: Pooling = "average",
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
) -> Tensor:
    """Pool blocks of ``factor`` consecutive tokens: x (..., N, d) -> (..., ceil(N / factor), d).

    Args:
        x: tokens.
        factor: tokens per block.
        mode: "average", "max", or "conv" with ``weight``.
        mask: right padding, broadcastable to x.shape[:-1]; True = real token. A block without one gives
            zeros.
        weight: (d, factor), a depth-wise kernel whose stride equals its length.
    """
    if factor == 1:
        return x
    length = x.size(-2)
    kernel = _scaled(weight, factor) if mode == "conv" else None
    factor = block_within(factor, length)
    if mask is not None:
        x = x.masked_fill(~mask[..., None], 0.0 if mode != "max" else -torch.inf)
    blocks = in_blocks(x, factor, -torch.inf if mode == "max" else 0.0)
    if mask is None:
        key = "block lengths", length, factor
        count = kept_constant(key, x, lambda: _block_lengths(length, factor, x.device))
    else:
        count = in_blocks(mask[..., None], factor).sum(dim=(-2, -1))
    if mode == "max":
        pooled = blocks.amax(dim=-2)
        return pooled if mask is None else pooled.masked_fill(count[..., None] == 0, 0.0)
    if kernel is not None:
        blocks = blocks * kernel[:factor]
    dtype = accumulation_dtype(blocks.dtype)
    count = count if mask is None else count.clamp_min(1)
    return (blocks.sum(dim=-2, dtype=dtype) / count[..., None]).to(x.dtype)


def running_pool(
    x: Tensor, factor: int, mode: Pooling = "average", *, weight: Tensor | None = None
) -> Tensor:
    """Row i is the block of token i, pooled over its tokens up to i: x (..., N, d) -> (..., N, d).

    The last row of a complete block is that block of ``pool``, and the last row of any prefix is the last
    block of the prefix pooled. The arguments are those of ``pool``.
    """
    if factor == 1:
        return x
    kernel = _scaled(weight, factor) if mode == "conv" else None
    factor = block_within(factor, x.size(-2))
    blocks = in_blocks(x, factor, -torch.inf if mode == "max" else 0.0)
    if mode == "max":
        pooled = blocks.cummax(dim=-2).values
    else:
        if kernel is not None:
            blocks = blocks * kernel[:factor]
        total = blocks.cumsum(dim=-2, dtype=accumulation_dtype(blocks.dtype))
        pooled = (total / numbers_to(factor, total)).to(x.dtype)
    return pooled.flatten(-3, -2)[..., : x.size(-2), :]


def pool_mask(mask: Tensor, factor: int) -> Tensor:
    """Which blocks hold a real token: right padding (B, N) -> (B, ceil(N / factor))."""
    if factor == 1:
        return mask
    count = (mask.size(1) + factor - 1) // factor
    return mask.index_select(1, torch.arange(count, device=mask.device) * factor)


def block_within(factor: int, length: int) -> int:
    """The tokens of a block, no more than the sequence has; a compiler's form serves all lengths."""
    return factor if is_for_all_sizes() else min(factor, length)


def _block_lengths(length: int, factor: int, device: torch.device) -> Tensor:
    starts = torch.arange(0, length, factor, device=device)
    return (length - starts).clamp_max(factor)


def _scaled(weight: Tensor | None, factor: int) -> Tensor:
    """The kernel as (factor, d), scaled so that the sum of products over the token count is the block."""
    if weight is None:
        raise ValueError("pooling 'conv' needs weight, (d, factor)")
    return factor * weight.mT
