"""Tensors that depend on sizes alone, made once and kept from step to step."""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from kernel_attention.tensors.recompute import is_for_all_sizes, is_transformed

Made = TypeVar("Made", bound=Tensor | tuple[Tensor, ...])

_KEPT: OrderedDict[tuple[Any, ...], Any] = OrderedDict()
_MOST_KEPT = 64


def kept_constant(key: tuple[Any, ...], like: Tensor, make: Callable[[], Made]) -> Made:
    """The constant that ``make`` makes, once for each of the last keys and devices; nobody may write into it.

    It is a tensor, or a tuple of them, of sizes alone and not of values. ``key`` is a name and all that it
    depends on; ``like`` a tensor of the call, on the device of the result.
    """
    if type(like) is not Tensor or is_for_all_sizes() or is_transformed():
        return make()  # a transform's tensors end with it
    key = *key, like.device
    found = _KEPT.get(key)
    if found is not None:
        return found
    with torch.inference_mode(False):  # a backward pass may read it
        made = make()
    # What a mode makes may be no tensor like others, and what a CUDA graph makes has no value before it runs.
    first = made if isinstance(made, Tensor) else made[0]
    is_captured = like.is_cuda and torch.cuda.is_current_stream_capturing()
    if type(first) is Tensor and not is_captured:
        _KEPT[key] = made
        if len(_KEPT) > _MOST_KEPT:
            _KEPT.popitem(last=False)
    return made
