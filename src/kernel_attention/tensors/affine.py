"""Affine maps, as weight and bias, for functions that multiply them together."""

from __future__ import annotations

import torch
from torch import Tensor

Affine = tuple[Tensor, Tensor | None]
"""Weight (out, in) and bias (out,) or None."""


def apply_affine(x: Tensor, parameters: Affine) -> Tensor:
    """x W^T + b in the precision of x."""
    weight, bias = parameters
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def product_dtype(x: Tensor) -> torch.dtype:
    """The precision of products with x: that of autocast, or x's own where autocast is off.

    Autocast leaves float64 alone.
    """
    device = x.device.type
    if x.dtype == torch.float64:
        return x.dtype
    is_on = not x.is_meta and torch.is_autocast_enabled(device)  # PyTorch has none for meta tensors
    return torch.get_autocast_dtype(device) if is_on else x.dtype


def autocast(x: Tensor) -> Tensor:
    """x in the precision that autocast gives to products; x itself where autocast is off."""
    return x.to(product_dtype(x))


def wide(x: Tensor) -> Tensor:
    """x in the precision of products with it, and in float32 where that is float16.

    A sum over the tokens, or a number over a small variance, leaves the range of float16. bfloat16 has the
    range of float32.
    """
    dtype = product_dtype(x)
    return x.to(torch.float32 if dtype == torch.float16 else dtype)
