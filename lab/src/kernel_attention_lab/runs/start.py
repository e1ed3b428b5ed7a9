"""The trained run that a training starts from, as the key ``start_from`` of a recipe names it."""

from __future__ import annotations

from typing import Any

from kernel_attention.errors import InputError
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks.experiment import Experiment, Trained


def prepare(experiment: Experiment, model: Any, seed: int) -> None:
    """Set what an untrained model has from its training data, or from the run in ``start_from``.

    It is the model of the same seed where the run has it, else that of its first seed.

    Raises:
        InputError: for a folder that is no run of the task ``experiment.starts_with`` with a trained seed,
            and for a trained model that does not fit.
    """
    start_from = getattr(experiment.recipe, "start_from", "")
    if not start_from:
        experiment.prepare(model, seed)
        return
    try:
        run = load_run(start_from)
        if run.recipe.task_name != experiment.starts_with:
            raise InputError(f"it is of task {run.recipe.task_name} (accepted: {experiment.starts_with})")
        trained = run.model(seed if seed in run.seeds else None)
        experiment.start(model, Trained(run.recipe, run.facts, trained))
    except InputError as error:
        raise InputError(f"start_from={start_from!r}: {error}") from None


def check_start(experiment: Experiment) -> None:
    """InputError where the run to start from does not fit, before anything is written."""
    recipe = experiment.recipe
    for seed in recipe.seeds if getattr(recipe, "start_from", "") else ():
        prepare(experiment, experiment.build_model(recipe, experiment.facts()), seed)
