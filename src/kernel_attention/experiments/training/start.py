"""The trained run that a training starts from, as the key ``start_from`` of a recipe names it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kernel_attention.errors import InputError
from kernel_attention.experiments.training.recipe import BaseRecipe
from kernel_attention.experiments.training.saved import SavedRun, load_run


@contextmanager
def opened_start(start_from: str, kind: type[BaseRecipe]) -> Iterator[SavedRun]:
    """The run in this folder, which must be of a task. Every InputError inside begins with the folder.

    Raises:
        InputError: for a folder that is no run of this task.
    """
    try:
        run = load_run(start_from)
        if not isinstance(run.recipe, kind):
            raise InputError(f"it is of task {run.recipe.task_name} (accepted: {kind.task_name})")
        yield run
    except InputError as error:
        raise InputError(f"start_from={start_from!r}: {error}") from None


def start_model(run: SavedRun, seed: int) -> Any:
    """The model of this seed where the run has it, else that of its first seed."""
    return run.model(seed if seed in run.seeds else None)


def require_alike(trained: BaseRecipe, recipe: BaseRecipe, keys: Sequence[str]) -> None:
    """InputError where two recipes differ in one of these keys."""
    different = [key for key in keys if getattr(trained, key) != getattr(recipe, key)]
    if different:
        said = (
            f"{key} is {getattr(trained, key)} there and {getattr(recipe, key)} here" for key in different
        )
        raise InputError(f"{', '.join(said)}; both must be equal")
