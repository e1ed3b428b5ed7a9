"""The functions of ``shrinkage`` in C++ (``native_kernels.cpp``), for float32 and float64 on CPUs.

Each is one sweep over the rows, where PyTorch's operations are up to ten. Legend as in ``fused``.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernel_attention.mechanisms.kernel_pca.engines.shrinkage import Pulled
from kernel_attention.native import TYPES, load_kernels
from kernel_attention.tensors.softmax.attention import empty_by_token

_SOURCE = Path(__file__).with_suffix(".cpp")


class _Sizes(ctypes.Structure):
    """``Sizes`` of the C++ file."""

    _fields_ = [(name, ctypes.c_int64) for name in ("batch", "heads", "length", "width", "threads")]


class _Rows(ctypes.Structure):
    """``Rows`` of the C++ file."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    ]


def clean(
    data: Tensor, clipped: Tensor | None, low: Tensor | None, before: Tensor | None, threshold: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As ``shrinkage.clean``; ``dtype`` is the data's."""
    keys = empty_by_token(data)
    found = empty_by_token(data) if clipped is None else clipped
    _call("clean", data, data, clipped, low, before, threshold, keys, found)
    return keys, found


def following(
    data: Tensor, offset: Tensor | None, threshold: Tensor, low: Tensor, before: Tensor | None
) -> Tensor:
    """As ``shrinkage.following``."""
    found = empty_by_token(data)
    _call("following", data, data, offset, threshold, low, before, found)
    return found


def clean_again(
    data: Tensor, offset: Tensor | None, low: Tensor | None, threshold: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor | None]:
    """As ``shrinkage.clean_again``; here ``pull_back`` needs E_{t-1}."""
    keys = empty_by_token(data)
    _call("clean_again", data, data, offset, low, threshold, keys)
    return keys, offset


def pull_back(
    data: Tensor, threshold: Tensor, offset: Tensor | None, parts: Sequence[Tensor], by_offset: Tensor | None,
    by_data: Tensor | None, *, is_first: bool,
) -> Pulled:  # fmt: skip
    """As ``shrinkage.pull_back``; what it returns lies in the memory of the parts."""
    part, other = parts if len(parts) == 2 else (*parts, None)
    by_low = to_offset = None
    if not is_first:
        by_low, to_offset = empty_by_token(data) if other is None else other, part
    if by_data is None:
        by_data = empty_by_token(data).zero_()
    by_rows = data.new_empty(*data.shape[:3], 1)
    inputs = data, offset, threshold, part, other, by_offset
    _call("pull_back", data, *inputs, by_low, to_offset, by_data, by_rows)
    return Pulled(by_low, to_offset, by_data, by_rows.sum_to_size(threshold.shape))


def _call(name: str, like: Tensor, *tensors: Tensor | None) -> None:
    """Run a function of the C++ file on tensors of the shape of ``like``; it writes into the last of them."""
    sizes = _Sizes(*like.shape, torch.get_num_threads())
    held = [_in_rows(tensor) for tensor in tensors]
    rows = (_Rows * len(held))(*(_rows(tensor) for tensor in held))
    getattr(load_kernels(_SOURCE), f"{name}_{TYPES[like.dtype]}")(ctypes.byref(sizes), rows)


def _in_rows(tensor: Tensor | None) -> Tensor | None:
    """The tensor with the numbers of a row side by side."""
    if tensor is None or tensor.stride(-1) == 1 or tensor.size(-1) == 1:
        return tensor
    return tensor.contiguous()


def _rows(tensor: Tensor | None) -> _Rows:
    """An axis of size 1 stands for one of any size."""
    if tensor is None:
        return _Rows(None, 0, 0, 0)
    axes = zip(tensor.shape[:3], tensor.stride()[:3], strict=True)
    return _Rows(tensor.data_ptr(), *(0 if size == 1 else step for size, step in axes))
