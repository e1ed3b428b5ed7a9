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
    """The calls of this process inside the block, all but those of DistributedDataParallel.

    The list can be cleared at any time.
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


def count_gradients(module: Any, sent: list[Sent]) -> None:
    """Add what DistributedDataParallel hands over inside PyTorch: the gradients, a bucket at a time.

    Args:
        module: nothing happens for another class.
        sent: what is added to.
    """
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    # PyTorch refuses annotations of a hook that are text, as all are here.
    def counted(state, bucket):  # type: ignore[no-untyped-def]
        sent.append(Sent("all_reduce", bucket.buffer().nbytes))
        return allreduce_hook(state, bucket)

    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, counted)
