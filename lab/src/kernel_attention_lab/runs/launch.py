"""Start the other processes of a run that was started alone.

Each is ``python -m kernel_attention_lab.runs.join``. It reads what to train as one line of its
standard input and ends when that is closed, so none outlives the first process, however that ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeAlias

import torch
import torch.distributed as dist

from kernel_attention.errors import InputError
from kernel_attention.training.processes import Processes, ProcessPlace, joined, place_from_environment
from kernel_attention_lab.tasks.recipe import BaseRecipe

_MODULE = "kernel_attention_lab.runs.join"
_HERE = "127.0.0.1"
_PORT = "KERNEL_ATTENTION_PORT"  # where the process that has started this one can be met
_GRACE = 20.0  # seconds in which a process that has no more to do ends
_LAST_WORDS = 5.0  # seconds in which one whose connection is gone has ended

Failure: TypeAlias = Callable[[float], str | None]


class ProcessFailed(RuntimeError):
    """One of the other processes of the run failed."""


def recipe_place(recipe: BaseRecipe) -> ProcessPlace:
    """The place of this process among those of a recipe.

    Raises:
        InputError: where torchrun has started another number of processes than the recipe asks for, and where
            several machines are asked for without it.
    """
    place = place_from_environment()
    if place is None:
        if recipe.num_nodes > 1:
            raise InputError(
                f"num_nodes={recipe.num_nodes}: start the run on every machine with torchrun --nnodes "
                f"{recipe.num_nodes} --nproc-per-node {recipe.devices} -m kernel_attention_lab train ..."
            )
        return ProcessPlace(0, recipe.devices, 0, recipe.devices)
    if (place.world, place.local_world) != (recipe.processes, recipe.devices):
        raise InputError(
            f"torchrun has started {place.world} processes, {place.local_world} on this machine, and the "
            f"recipe asks for devices={recipe.devices} on num_nodes={recipe.num_nodes}"
        )
    return place


@contextlib.contextmanager
def together(
    recipe: BaseRecipe, place: ProcessPlace, device: torch.device, job: dict[str, Any]
) -> Iterator[Processes]:
    """All processes of the run, the other ones started where nobody else has.

    Args:
        recipe: of the run.
        place: of this process.
        device: of its model.
        job: what the others are told, as values of JSON.

    Raises:
        ProcessFailed: where another process has failed; the message has its last words.
    """
    if place.world == 1 or place_from_environment() is not None:
        with joined(place, device, recipe.sequence_shards, _store_of_the_first(place)) as processes:
            yield processes
        return
    # Port 0 is a free one; the store says which.
    store = _tcp_store(_HERE, 0, place.world, is_master=True, wait_for_workers=False)
    with _children(place, store.port, job) as failure:
        _wait_for_all(store, place.world, failure)
        with joined(place, device, recipe.sequence_shards, store) as processes:
            try:
                yield processes
            except RuntimeError as error:  # of this process, or a connection that is gone
                said = failure(_LAST_WORDS)
                if said is None:
                    raise
                raise ProcessFailed(said) from error


def _store_of_the_first(place: ProcessPlace) -> Any:
    """The store of the process that has started this one, told that it is here; None under torchrun."""
    port = os.environ.get(_PORT)
    if port is None:
        return None
    store = _tcp_store(_HERE, int(port), place.world, is_master=False)
    store.set(f"here/{place.rank}", "")
    return store


def _tcp_store(*arguments: Any, **options: Any) -> Any:
    """torch's store over TCP, which its type stubs do not name."""
    return dist.TCPStore(*arguments, **options)  # type: ignore[attr-defined]


def _wait_for_all(store: Any, world: int, failure: Failure) -> None:
    """Wait until every other process has loaded its data; ProcessFailed where one has ended before."""
    while not store.check([f"here/{rank}" for rank in range(1, world)]):
        if (said := failure(0.0)) is not None:
            raise ProcessFailed(said)
        time.sleep(0.05)


@contextlib.contextmanager
def _children(place: ProcessPlace, port: int, job: dict[str, Any]) -> Iterator[Failure]:
    """The processes of all ranks but 0. They end with the block. Yields what tells which one failed."""
    with contextlib.ExitStack() as held:
        children: list[tuple[subprocess.Popen[bytes], IO[bytes]]] = []

        def failure(patience: float) -> str | None:
            """The last words of the first child that failed; None where none has, after some seconds each."""
            for rank, (child, log) in enumerate(children, start=1):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    if child.wait(timeout=patience):
                        log.seek(0)
                        words = log.read().decode(errors="replace").split("\n")
                        said = next((line for line in reversed(words) if line.strip()), "it said nothing")
                        return f"process {rank} ended with exit code {child.returncode}: {said}"
            return None

        try:
            for rank in range(1, place.world):
                log = held.enter_context(tempfile.TemporaryFile("w+b"))
                child = held.enter_context(_start(rank, place.world, port, log))
                children.append((child, log))
                assert child.stdin is not None
                child.stdin.write(json.dumps(job).encode() + b"\n")
                child.stdin.flush()
            yield failure
            failure(_GRACE)  # they have no more to do
        finally:
            for child, _ in children:
                assert child.stdin is not None
                with contextlib.suppress(OSError):
                    child.stdin.close()  # which ends it


def _start(rank: int, world: int, port: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
    environment = os.environ | {
        "RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
        _PORT: str(port), "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-m", _MODULE],
        env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=log,
    )  # fmt: skip
