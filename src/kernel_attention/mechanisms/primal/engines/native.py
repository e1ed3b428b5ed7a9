"""The functions of ``token_slices`` in C++ (``native_kernels.cpp``), for float32 and float64 on CPUs.

Every thread takes slices of its own from beginning to end, so threads wait for one another once a pass.
Between two matrix products bias, norm and scale are one sweep over a slice in the cache.

Legend as in ``fused``.
"""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.mechanisms.primal.engines.cpu import Sums, Tokens
from kernel_attention.native import TYPES, address, load_kernels, matrix_product

_SOURCE = Path(__file__).with_suffix(".cpp")
_LEAST = 256  # tokens of a unit of work; fewer are not worth sums of their own
_UNITS = 2  # of a thread at least, in long sequences: a thread that is held up leaves one to the others


class _Sizes(ctypes.Structure):
    """``Sizes`` of the C++ file."""

    _fields_ = [
        (name, ctypes.c_int64)
        for name in (
            "batch", "length", "width", "halves", "head", "groups", "outputs", "maps", "parts", "threads",
            "normalize",
        )
    ]  # fmt: skip


def map_tokens(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, constant: Tensor,
    with_gram: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As ``token_slices.map_tokens``."""
    sizes = _sizes(tokens, x, weight, maps)
    y = x.new_empty(x.size(0), x.size(1), sizes.groups * sizes.outputs)
    gram = None
    if with_gram:
        gram = x.new_zeros(x.size(0) * sizes.parts, sizes.halves, sizes.head, sizes.head)
    call_kernel("map_tokens", sizes, x, weight, bias, maps, tokens.mask, constant.to(x.dtype), y, gram)
    return y, None if gram is None else _of_sequences(gram, sizes).unflatten(1, (-1, 2))


def pull_back(
    tokens: Tokens, x: Tensor, weight: Tensor, bias: Tensor | None, maps: Tensor, pull: Tensor | None,
    grad_y: Tensor,
) -> Sums:  # fmt: skip
    """As ``token_slices.pull_back``."""
    sizes = _sizes(tokens, x, weight, maps)
    units = x.size(0) * sizes.parts
    grad_x = x.new_empty(x.shape)
    shapes = (weight.shape, weight.shape[:1], maps.shape[1:], (sizes.groups * sizes.outputs,))
    sums = [x.new_zeros(units, *shape) for shape in shapes]
    call_kernel("pull_back", sizes, x, weight, bias, maps, tokens.mask, pull, grad_y, grad_x, *sums)
    own = _of_sequences(sums[2], sizes)
    return Sums(
        grad_x,
        sums[0].sum(dim=0),
        sums[1].sum(dim=0),
        own if sizes.maps == sizes.batch else own.sum(dim=0, keepdim=True),
        sums[3].sum(dim=0),
    )


def _sizes(tokens: Tokens, x: Tensor, weight: Tensor, maps: Tensor) -> _Sizes:
    """The sizes, and the division into units of work: parts of every sequence."""
    batch, length, width = x.shape
    halves, threads = 2 * tokens.num_heads, torch.get_num_threads()
    units = _UNITS * threads
    parts = min(units // math.gcd(batch, units), max(1, length // _LEAST))
    return _Sizes(
        batch, length, width, halves, weight.size(0) // halves, maps.size(1), maps.size(3), maps.size(0),
        parts, threads, tokens.normalize,
    )  # fmt: skip


def call_kernel(name: str, sizes: ctypes.Structure, *tensors: Tensor | None) -> None:
    """Run a function of the C++ file; it writes into its last tensors, which are contiguous."""
    dtypes = {tensor.dtype for tensor in tensors if tensor is not None and tensor.is_floating_point()}
    if len(dtypes) > 1:
        raise InputError(f"native kernels take one precision, not {', '.join(sorted(map(str, dtypes)))}")
    (dtype,) = dtypes
    held = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    function = getattr(load_kernels(_SOURCE), f"{name}_{TYPES[dtype]}")
    function(matrix_product(dtype), ctypes.byref(sizes), *map(address, held))


def _of_sequences(sums: Tensor, sizes: _Sizes) -> Tensor:
    """Sums of every unit (U, ..) -> of every sequence (B, ..)."""
    return sums if sizes.parts == 1 else sums.unflatten(0, (-1, sizes.parts)).sum(dim=1)
