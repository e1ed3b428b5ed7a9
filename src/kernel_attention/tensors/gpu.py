"""Kernels for NVIDIA GPUs: the needs of Triton's, and those of flash-linear-attention, the package ``fla``.

The latter take (B, N, h, p), causal, in bfloat16, and come with gradients of their own.
"""

import functools
import importlib
import inspect
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from kernel_attention.tensors.affine import product_dtype
from kernel_attention.tensors.recompute import differentiable_gradients, differentiable_leaves

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


FLA = "fla"
"""The value of a layer's option ``impl`` that asks for these kernels."""

FLA_PAYS_FROM = 128
"""Tokens: in fewer, our own forms have a chunk or a few blocks, and hardly more launches than one kernel."""

_WIDTHS = range(16, 257)  # of a head


@functools.cache
def find_kernel(name: str) -> Callable[..., Any] | None:
    """A function of ``fla.ops`` by its name, such as "delta_rule.chunk_delta_rule"; None: not installed."""
    module, _, function = name.rpartition(".")
    try:
        return getattr(importlib.import_module(f"fla.ops.{module}"), function)
    except (ImportError, AttributeError):
        return None


def why_no_kernel(
    name: str, x: Tensor, num_heads: int, head_dim: int, *, compiled: bool, is_packed: bool
) -> str | None:
    """The reason why the kernel of this name does not serve a causal call on x (B, N, d); None: it does."""
    if x.device.type != "cuda":
        return "its kernels are for NVIDIA GPUs"
    if compiled:
        return "its kernels would break a compiled graph"
    if (dtype := product_dtype(x)) != torch.bfloat16:
        return f"its kernels are for bfloat16, and products are in {dtype}"
    if head_dim not in _WIDTHS:
        return f"heads of width {head_dim}, and its kernels take 16 to 256"
    if x.size(1) < num_heads:
        return f"its kernels refuse fewer tokens than heads ({x.size(1)} and {num_heads})"
    kernel = find_kernel(name)
    if kernel is None:
        return "flash-linear-attention (the package fla) is not installed"
    if is_packed and "cu_seqlens" not in inspect.signature(kernel).parameters:
        return "its installed version takes no packed sequences"
    return None


def run_kernel(kernel: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    """``kernel`` of the inputs. Where its gradient is differentiated again, it is that of ``formula``."""
    return _Kernel.apply(kernel, formula, *inputs)


class _Kernel(torch.autograd.Function):
    """The kernel with its own gradients; gradients of gradients come from the formula."""

    @staticmethod
    def forward(
        ctx: Any, kernel: Callable[..., Tensor], formula: Callable[..., Tensor], *inputs: Tensor
    ) -> Tensor:
        ctx.formula = formula
        ctx.save_for_backward(*inputs)
        needed = ctx.needs_input_grad[2:]
        if not any(needed):
            return kernel(*inputs)
        leaves = [x.detach().requires_grad_(want) for x, want in zip(inputs, needed, strict=True)]
        with torch.enable_grad():
            out = kernel(*leaves)
        ctx.graph = out, leaves
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():
            leaves = differentiable_leaves(ctx.saved_tensors, needed)
            found = differentiable_gradients([ctx.formula(*leaves)], leaves, needed, [grad])
            return None, None, *found
        out, leaves = ctx.graph
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        grads = iter(torch.autograd.grad(out, wanted, grad, retain_graph=True))
        return None, None, *(next(grads) if want else None for want in needed)
