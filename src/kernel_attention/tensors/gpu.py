"""Needs of Triton kernels on a GPU, and how they multiply float32."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from kernel_attention.tensors.affine import product_dtype

_HOPPER = 9  # the major number of the compute capability


def float32_products() -> str:
    """Triton's name for the products of float32 that PyTorch is set to: "tf32" or "ieee", exact ones."""
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # the older switch raises an error where this one was set
        return "tf32" if matmul.fp32_precision == "tf32" else "ieee"
    return "tf32" if matmul.allow_tf32 else "ieee"


def why_not_measured(x: Tensor) -> str | None:
    """Why no measurement speaks for Triton kernels on x, which lies on a GPU; None: one does."""
    if torch.compiler.is_compiling():  # which cannot ask for the rest
        return "the kernels were measured in eager mode alone"
    if product_dtype(x) not in (torch.bfloat16, torch.float16):
        return "the kernels were measured to be faster in 16 bits alone"
    if torch.cuda.get_device_capability(x.device)[0] != _HOPPER:
        return "the kernels were measured on an H100 alone"
    return None if has_triton() else "Triton is not installed"


@cache
def has_triton() -> bool:
    """True where Triton is installed, as it is with the CUDA builds of PyTorch."""
    return find_spec("triton") is not None
