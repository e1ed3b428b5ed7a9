"""Global states that a caller may have set, put aside while a model is trained or asked."""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch

P = ParamSpec("P")
R = TypeVar("R")

_one_at_a_time = threading.Lock()


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


@contextlib.contextmanager
def private_generators(seed: int, device: torch.device) -> Iterator[None]:
    """Seed the generators that training on ``device`` draws from, and restore the caller's states afterwards.

    The default dtype is float32 meanwhile, so that layers and random numbers are the same whatever it was.
    One thread at a time may do this, because both belong to the whole process.
    """
    on_cpu = device.type == "cpu"
    devices = [] if on_cpu else list(range(torch.accelerator.device_count()))
    # On a CPU, torch.manual_seed would seed the GPUs too, whose states are not kept.
    seed_torch = torch.default_generator.manual_seed if on_cpu else torch.manual_seed
    with _one_at_a_time, torch.random.fork_rng(devices, device_type="cuda" if on_cpu else device.type):
        python, numpy = random.getstate(), np.random.get_state()
        try:
            seed_torch(seed)
            np.random.seed(seed)
            random.seed(seed)
            with default_dtype(torch.float32):
                yield
        finally:
            random.setstate(python)
            np.random.set_state(numpy)


def get_generators() -> dict[str, Any]:
    """States of all global generators, in types that ``weights_only`` loading accepts."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), [int(key) for key in keys], *rest],
        "python": random.getstate(),
    }


def set_generators(state: dict[str, Any]) -> None:
    """Continue with these states, of ``get_generators``."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
