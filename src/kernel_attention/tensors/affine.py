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
    """The precision of products with x: that of autocast, or x's own where autocast is off."""
    device = x.device.type
    is_on = not x.is_meta and torch.is_autocast_enabled(device)  # PyTorch has none for meta tensors
    return torch.get_autocast_dtype(device) if is_on else x.dtype


def autocast(x: Tensor) -> Tensor:
    """x in the precision that autocast gives to products; x itself where autocast is off."""
    return x.to(product_dtype(x))
