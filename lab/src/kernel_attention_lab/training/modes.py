"""The global states of PyTorch that a caller may have set, put aside while a model is trained or asked."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@contextlib.contextmanager
def plain_modes() -> Iterator[None]:
    """Gradients on; no inference mode, autocast or default device. These are states of the thread."""
    with contextlib.ExitStack() as stack:
        # Inference mode first: it also sets whether gradients are on.
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in _autocast_devices():
            stack.enter_context(torch.autocast(kind, enabled=False))
        if torch.get_default_device() != torch.device("cpu"):  # the context costs time in every call of torch
            stack.enter_context(torch.device("cpu"))
        yield


def in_plain_modes(function: Callable[P, R]) -> Callable[P, R]:
    """The function, called within ``plain_modes``."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        with plain_modes():
            return function(*args, **kwargs)

    return called


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Another default dtype for a time. It belongs to the whole process, as random generators do."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _autocast_devices() -> list[str]:
    found: Any = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kinds = ["cpu"] if found is None else ["cpu", found.type]
    return [kind for kind in kinds if torch.is_autocast_enabled(kind)]
