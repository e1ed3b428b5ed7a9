"""A run: recipe in, run folder out."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import statistics
import sys
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch

import kernel_attention
from kernel_attention.errors import InputError
from kernel_attention.notes import note
from kernel_attention.reporting import write_report
from kernel_attention.training.experiment import Experiment, Metric
from kernel_attention.training.facts import read_facts, require_same_data
from kernel_attention.training.files import (
    is_unfinished,
    read_json,
    read_weights,
    remove_unfinished,
    write_json,
    write_yaml,
)
from kernel_attention.training.fit import check_trainer, fit
from kernel_attention.training.recipe import BaseRecipe
from kernel_attention.training.tasks import experiment_class


def train(
    recipe: BaseRecipe,
    output: Path,
    *,
    name: str = "run",
    data_root: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
) -> dict[str, Any]:
    """Train and evaluate a recipe with every one of its seeds.

    Nothing is written before the data and the model were found good.

    Args:
        recipe: what to do.
        output: the run folder; must not exist or be empty, unless ``resume``.
        name: what the summary calls the recipe; a resumed run has its own.
        data_root: where data sets are looked for first.
        resume: continue the run in ``output`` from its last checkpoint.
        progress: show a progress bar.

    Returns:
        The content of ``summary.json``.

    Raises:
        InputError: bad recipe, data or folder.
        Interrupted: Ctrl-C.
        FloatingPointError: the loss is no longer finite.
    """
    if not resume:
        _check_unused(output)
    check_trainer(recipe)
    experiment = experiment_class(recipe.task_name)(recipe, data_root)
    experiment.check()
    facts = experiment.facts()
    if resume:
        name = _reopen_folder(output, recipe, facts) or name
    else:
        _open_folder(output, recipe, facts, name)
        for remark in recipe.remarks():
            note(remark)
    results = [_train_seed(experiment, output / f"seed-{seed}", seed, progress) for seed in recipe.seeds]
    summary = summarise(recipe, name, results, experiment.metric)
    write_json(output / "summary.json", summary)
    write_report(output)
    return summary


def build_model(recipe: BaseRecipe, facts: dict[str, Any]) -> Any:
    """The recipe's model for data with these facts."""
    return experiment_class(recipe.task_name).build_model(recipe, facts)


def summarise(recipe: BaseRecipe, name: str, results: list[dict[str, Any]], metric: Metric) -> dict[str, Any]:
    """Mean and sample deviation over the seeds."""
    values = [result[metric.name] for result in results]
    return {
        "recipe": name,
        "dataset": recipe.dataset,
        "attention": recipe.attention_name(),
        "protocol": recipe.protocol,
        "protocol_text": recipe.protocol_text,
        "seeds": recipe.seeds,
        "metric": metric.name,
        "values": values,
        "mean": statistics.fmean(values),
        "std": statistics.stdev(values) if len(values) > 1 else None,
        "seconds": round(sum(result["seconds"] for result in results), 1),
        "machine": machine(),
    }


def machine() -> str:
    """Processor, threads and accelerator, in one line."""
    accelerator = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, {accelerator}"


def _check_unused(output: Path) -> None:
    """InputError unless a run can begin in ``output``: nothing is there, or a run killed before it began."""
    try:
        found = [path for path in output.iterdir() if not is_unfinished(path)] if output.exists() else []
    except OSError as error:
        raise InputError(f"output {output}: cannot be a run folder ({error.strerror or error})") from None
    if {path.name for path in found} - {"versions.json", "data.json"}:
        raise InputError(
            f"output {output} is not empty: choose another folder, or continue it with --resume {output}"
        )


def _open_folder(output: Path, recipe: BaseRecipe, facts: dict[str, Any], name: str) -> None:
    """Make the run folder; failing, leave all as it was. ``config.yaml`` comes last: it makes it a run."""
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
        write_json(output / "versions.json", {"recipe": name, **_versions()})
        write_json(output / "data.json", facts)
        write_yaml(output / "config.yaml", recipe.keys())
    except BaseException as error:
        with contextlib.suppress(OSError):
            for file in ("versions.json", "data.json", "config.yaml"):
                (output / file).unlink(missing_ok=True)
            for folder in created:
                folder.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"output {output}: cannot be written ({error.strerror or error})") from None
        raise


def _reopen_folder(output: Path, recipe: BaseRecipe, facts: dict[str, Any]) -> str | None:
    """Make an unfinished run ready to go on; the name of its recipe."""
    require_same_data(facts, read_facts(output, recipe.task_name))
    try:
        remove_unfinished(output)
        for stale in (output / "error.txt", *output.glob("seed-*/interrupted.safetensors")):
            stale.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"run {output}: cannot be written ({error.strerror or error})") from None
    versions = read_json(output / "versions.json")
    return versions.get("recipe") if isinstance(versions, dict) else None


def _versions() -> dict[str, str]:
    return {
        "command": " ".join(sys.argv),
        "kernel_attention": kernel_attention.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "lightning": L.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": machine(),
    }


def _train_seed(experiment: Experiment, folder: Path, seed: int, progress: bool) -> dict[str, Any]:
    if (folder / "evaluation.json").exists():  # a finished seed of a resumed run
        return read_json(folder / "evaluation.json")
    recipe = experiment.recipe
    folder.mkdir(exist_ok=True)
    L.seed_everything(seed, verbose=False)
    model = experiment.build_model(recipe, experiment.facts())
    experiment.prepare(model, seed)
    recorder = experiment.recorder(folder, seed)
    train_batches, val_batches = experiment.loaders(seed)
    fit(
        experiment.task(model),
        train_batches,
        val_batches,
        callbacks=[recorder],
        checkpoint=recorder.checkpoint if recorder.checkpoint.exists() else None,
        progress=progress,
    )
    model.load_state_dict(read_weights(folder / "best.safetensors"))
    result = experiment.evaluate(model)
    if not math.isfinite(result["loss"]):
        raise FloatingPointError(f"the loss on the test split is {result['loss']}")
    result |= {
        "protocol": recipe.protocol,
        "split": "test",
        **recorder.choice(),
        "seconds": round(sum(row["seconds"] for row in recorder.rows), 1),
    }
    for name, content in experiment.appendices(model).items():
        write_json(folder / name, content)
    write_json(folder / "evaluation.json", result)
    return result
