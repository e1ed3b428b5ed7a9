"""The steps of RPC-Attention between its attentions, in PyTorch's operations.

Legend and recursion as in ``cpu.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


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
