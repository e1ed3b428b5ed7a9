"""Affine maps, as weight and bias, for functions that multiply them together."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kernel_attention.tensors.recompute import needs_gradient
from kernel_attention.tensors.statistics import exactly

_HAS_WIDE_PRODUCT = "dtype" in torch.ops.aten.bmm.overloads() and torch.version.hip is None
_COMPILES_WIDE_PRODUCT = TorchVersion(torch.__version__) >= "2.10"

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


def exact_product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, (batch, m, k) and (batch, k, n), which accumulates and stays in float32 or better.

    CUDA has such a product of 16-bit matrices. It is not differentiated, and fails in torch 2.9.0 where a
    compiler, and in others where ``FlopCounterMode``, looks on.
    """
    if _has_wide_product(a, b):
        return torch.bmm(a, b, out_dtype=torch.float32)
    return torch.bmm(exactly(a), exactly(b))


def _has_wide_product(a: Tensor, b: Tensor) -> bool:
    is_short = a.dtype == b.dtype and a.dtype in (torch.bfloat16, torch.float16)
    if not (is_short and _HAS_WIDE_PRODUCT and (a.is_cuda or a.is_meta)) or needs_gradient(a, b):
        return False
    if torch.compiler.is_compiling():
        return _COMPILES_WIDE_PRODUCT
    if torch._C._len_torch_dispatch_stack() == 0:
        return True
    return not any("FlopCounter" in type(mode).__name__ for mode in _get_current_dispatch_mode_stack())
