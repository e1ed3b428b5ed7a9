"""What a process hands to collectives, counted."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Where each of them has the tensor that this process gives.
_PLACES = {
    "all_reduce": 0,
    "all_gather": 1,
    "all_gather_into_tensor": 1,
    "all_gather_single": 1,  # its name from torch 2.13 on
    "reduce_scatter_tensor": 1,
    "reduce_scatter_single": 1,
}


class Sent(NamedTuple):
    """A call: the collective, and the bytes that this process gave it."""

    collective: str
    bytes: int


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[Sent]]:
    """The calls of this process inside the block. The list can be cleared at any time.

    DistributedDataParallel calls from C++, unless ``count_gradients`` has changed that.
    """
    sent: list[Sent] = []

    def counting(name: str, place: int) -> Any:
        call = getattr(dist, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            names = ("input", "input_tensor", "tensor")
            given = (
                arguments[place]
                if len(arguments) > place
                else next(options[name] for name in names if name in options)
            )
            sent.append(Sent(name, given.nbytes))
            return call(*arguments, **options)

        return counted

    with contextlib.ExitStack() as patched:
        for name in set(_PLACES) & set(dir(dist)):
            place = _PLACES[name]
            patched.enter_context(patch.object(dist, name, counting(name, place)))
        yield sent


def count_gradients(module: Any) -> None:
    """Have DistributedDataParallel call its all-reduce from Python, where ``counted_collectives`` sees it.

    Args:
        module: nothing happens for another class.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, allreduce_hook)
