"""Processes of a benchmark, what each of them hands to collectives, and the rows that are printed of them."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest.mock import patch

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Where each of them has the tensor that this process gives; "single" are the names from torch 2.13 on.
_PLACES = {
    "all_reduce": 0, "all_gather": 1, "all_gather_into_tensor": 1, "all_gather_single": 1,
    "reduce_scatter_tensor": 1, "reduce_scatter_single": 1,
}  # fmt: skip


class Sent(NamedTuple):
    """A call: the collective, and the bytes that this process gave it."""

    collective: str
    bytes: int


def in_processes(work: Callable[..., None], world: int, *arguments: Any) -> list[Any]:
    """What ``work(rank, world, *arguments, results)`` puts into ``results`` in each of so many processes."""
    spawn = multiprocessing.get_context("spawn")
    results = spawn.Queue()
    workers = [
        spawn.Process(target=work, args=(rank, world, *arguments, results), daemon=True)
        for rank in range(world)
    ]
    for worker in workers:
        worker.start()
    found: list[Any] = []
    while len(found) < world:
        with contextlib.suppress(queue.Empty):
            found.append(results.get(timeout=1))
        if any(worker.exitcode for worker in workers):
            raise SystemExit(f"a process of {world} failed")
    for worker in workers:
        worker.join(timeout=60)
    return found


@contextlib.contextmanager
def counted_collectives() -> Iterator[list[Sent]]:
    """The calls of this process inside the block. The list can be cleared at any time.

    DistributedDataParallel calls from C++, unless ``count_gradients`` has changed that.
    """
    sent: list[Sent] = []

    def counting(name: str, place: int) -> Any:
        call = getattr(dist, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            names = (key for key in ("input", "input_tensor", "tensor") if key in options)
            given = arguments[place] if len(arguments) > place else options[next(names)]
            sent.append(Sent(name, given.nbytes))
            return call(*arguments, **options)

        return counted

    with contextlib.ExitStack() as patched:
        for name in set(_PLACES) & set(dir(dist)):
            patched.enter_context(patch.object(dist, name, counting(name, _PLACES[name])))
        yield sent


def count_gradients(module: Any) -> None:
    """Have DistributedDataParallel call its all-reduce from Python, where ``counted_collectives`` sees it."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    if isinstance(module, DistributedDataParallel):
        module.register_comm_hook(None, allreduce_hook)


def print_row(row: dict[str, Any], first: dict[str, Any], figure: str) -> None:
    """Print a row; SystemExit where its figure differs from the first row's by more than rounding."""
    print(
        f"N {row['length']:,}  processes {row['processes']}  {row['seconds']:.2f} s a step  "
        f"{row['peak_gigabytes']:.2f} GB a process ({row['gigabytes_before_the_step']:.2f} before it)  "
        f"{row['bytes_to_collectives']:,} bytes a process  {figure} {row[figure]:.6f}",
        flush=True,
    )
    if abs(row[figure] / first[figure] - 1) > 1e-4:
        raise SystemExit(f"{figure}s differ: {row[figure]} and {first[figure]}")
