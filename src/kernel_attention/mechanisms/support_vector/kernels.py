"""The kernels that the support-vector layers choose from, by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from kernel_attention.core.kernel import AttentionKernel
from kernel_attention.errors import InputError, unknown
from kernel_attention.mechanisms.linear.kernel import LinearKernel
from kernel_attention.mechanisms.softmax.kernel import SoftmaxKernel
from kernel_attention.mechanisms.sparse.kernel import SparseKernel

KernelSpec = str | Mapping[str, Mapping[str, Any] | None]
"""A kernel: "softmax", "linear" or "sparse", or ``{name: options}``."""

KERNELS: dict[str, type[AttentionKernel]] = {
    "softmax": SoftmaxKernel,
    "linear": LinearKernel,
    "sparse": SparseKernel,
}


def get_kernel(kernel: KernelSpec, head_dim: int, max_len: int | None = None) -> AttentionKernel:
    """The kernel of that spec; InputError for an unknown name, option or value."""
    if isinstance(kernel, Mapping) and len(kernel) == 1:
        ((name, given),) = kernel.items()
        options = dict(given or {})
    elif isinstance(kernel, str):
        name, options = kernel, {}
    else:
        raise InputError(f"kernel={kernel!r} must be a name or {{name: options}}")
    if name not in KERNELS:
        raise unknown("kernel", name, KERNELS)
    accepted = [
        key for key in inspect.signature(KERNELS[name]).parameters if key not in ("head_dim", "max_len")
    ]
    for option in options:
        if option not in accepted:
            raise unknown(f"option of kernel {name!r}", option, accepted)
    return KERNELS[name](head_dim, max_len, **options)
