"""The kernels that the support-vector layers choose from, by name."""

from __future__ import annotations

import inspect

import torch

from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.core.parameters import Device
from kernel_attention.mechanisms.linear.kernel import LinearKernel
from kernel_attention.mechanisms.softmax.kernel import SoftmaxKernel
from kernel_attention.mechanisms.sparse.kernel import SparseKernel
from kernel_attention.specs import Spec, SpecReader

KernelSpec = Spec
"""A kernel: "softmax", "linear" or "sparse", or ``{name: options}``."""

ATTENTION_KERNELS: dict[str, type[AttentionKernel]] = {
    "softmax": SoftmaxKernel,
    "linear": LinearKernel,
    "sparse": SparseKernel,
}


def attention_kernel(
    kernel: KernelSpec,
    head_dim: int,
    max_len: int | None = None,
    *,
    device: Device = None,
    dtype: torch.dtype | None = None,
) -> AttentionKernel:
    """The kernel of that spec; InputError for an unknown name, option or value.

    ``device`` and ``dtype`` are those of its buffers, where it has any.
    """
    name, options = KERNEL_SPECS.read(kernel)
    kind = ATTENTION_KERNELS[name]
    where = {"device": device, "dtype": dtype} if kind is LinearKernel else {}
    return kind(head_dim, max_len, **options, **where)


def _options_of(name: str) -> list[str]:
    accepted = inspect.signature(ATTENTION_KERNELS[name]).parameters
    return [option for option in accepted if option not in ("head_dim", "max_len", "device", "dtype")]


KERNEL_SPECS = SpecReader(argument="kernel", kind="kernel", names=ATTENTION_KERNELS, options_of=_options_of)
