"""The processes of a run, which torchrun starts from a shell or here for the command, and their precision."""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
import threading
import time
import uuid
import warnings
from typing import TypeVar

from kernel_attention.errors import InputError
from kernel_attention.training.processes import (
    ProcessPlace,
    has_bfloat16,
    resolve_precision,
    training_device,
)
from kernel_attention_lab.tasks.recipe import BaseRecipe

Recipe = TypeVar("Recipe", bound=BaseRecipe)


class ProcessFailed(OSError):
    """A process of the run failed, and could not say why."""


def place_from_environment() -> ProcessPlace | None:
    """The place that torchrun gave this process; None where it was started alone."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    if not all(os.environ.get(name, "").isdecimal() for name in names):
        return None
    return ProcessPlace(*(int(os.environ[name]) for name in names))


def started_devices() -> dict[str, int]:
    """The keys ``devices`` and ``num_nodes`` of the processes that torchrun has started; none without it."""
    place = place_from_environment()
    if place is None or place.world == 1:
        return {}
    return {"devices": place.local_world, "num_nodes": place.world // place.local_world}


def is_first_process() -> bool:
    """True where this process speaks to the user: it was started alone, or is the first one of torchrun."""
    place = place_from_environment()
    return place is None or place.is_first


def recipe_place(recipe: BaseRecipe) -> ProcessPlace:
    """The place of this process among those of a recipe.

    Raises:
        InputError: where a recipe for several processes is not under torchrun, and where torchrun has started
            another number of processes than the recipe asks for.
    """
    place = place_from_environment()
    if place is None:
        if recipe.processes == 1:
            return ProcessPlace()
        nodes = f"on every machine with torchrun --nnodes {recipe.num_nodes}"
        raise InputError(
            f"devices={recipe.devices}, num_nodes={recipe.num_nodes}: start the run "
            f"{nodes if recipe.num_nodes > 1 else 'with torchrun'} --nproc-per-node {recipe.devices} "
            "-m kernel_attention_lab train ..."
        )
    if (place.world, place.local_world) != (recipe.processes, recipe.devices):
        raise InputError(
            f"torchrun has started {place.world} processes, {place.local_world} on this machine, and the "
            f"recipe asks for devices={recipe.devices} on num_nodes={recipe.num_nodes}"
        )
    return place


def with_precision(recipe: Recipe) -> Recipe:
    """The recipe with its precision resolved.

    Warns where bfloat16 is asked for and the processor lacks it. PyTorch then emulates it: the figures are
    the same, but a step can take ten times as long as in 32-true.
    """
    device = training_device(recipe.accelerator)
    if recipe.precision == "bf16-mixed" and not has_bfloat16(device):
        warnings.warn(
            f"precision=bf16-mixed: this processor ({device.type}) has no bfloat16 arithmetic; emulated, it "
            "can be ten times slower than 32-true (precision=auto takes bf16-mixed only where it is fast)",
            stacklevel=3,
        )
    return dataclasses.replace(recipe, precision=resolve_precision(recipe))


def run_under_torchrun(processes: int, words: list[str]) -> int:
    """Run a command line in several processes of this machine, and return its exit code.

    Only the first process writes to the screen.

    Raises:
        ProcessFailed: where another process failed, or the first was killed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=processes, max_restarts=0, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", logs_specs=DefaultLogsSpecs(local_ranks_filter={0}),
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "kernel_attention_lab", *words)
    except SignalException:
        return 1
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if rank == 0 and failure.exitcode > 0:  # it has said why
            return failure.exitcode
        raise ProcessFailed(f"process {rank} ended with exit code {failure.exitcode}") from None
    return 0


def end_with_torchrun() -> None:
    """Let this process end when torchrun is gone, also where that was killed."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
