"""A run: recipe in, run folder out."""

from __future__ import annotations

import contextlib
import dataclasses
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
from kernel_attention.data import (
    SequenceSplit,
    Standardizer,
    TimeSeriesData,
    load_time_series,
    make_loader,
    stratified_split,
)
from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.reporting import write_report
from kernel_attention.training.evaluation import evaluate_split, kernel_spectra
from kernel_attention.training.facts import describe_data, read_facts, require_same_data
from kernel_attention.training.files import (
    is_unfinished,
    read_json,
    read_weights,
    remove_unfinished,
    write_json,
    write_yaml,
)
from kernel_attention.training.fit import check_trainer, fit
from kernel_attention.training.module import SequenceTask
from kernel_attention.training.recipe import PROTOCOLS, Recipe
from kernel_attention.training.recorder import RunRecorder


def train(
    recipe: Recipe,
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
    data = load_time_series(recipe.dataset, data_root=data_root, missing=recipe.missing)
    facts = describe_data(data)
    build_model(recipe, facts)  # bad options are refused before anything is written
    _split(data, recipe, recipe.seeds[0])
    if resume:
        name = _reopen_folder(output, facts) or name
    else:
        _open_folder(output, recipe, facts, name)
    results = [_train_seed(recipe, data, output / f"seed-{seed}", seed, progress) for seed in recipe.seeds]
    summary = summarise(recipe, name, results)
    write_json(output / "summary.json", summary)
    write_report(output)
    return summary


def build_model(recipe: Recipe, facts: dict[str, Any]) -> SequenceClassifier:
    """The recipe's model for data with these facts."""
    num_outputs = len(facts["class_names"]) or 1
    shape = (facts["num_features"], num_outputs, facts["max_len"])
    return SequenceClassifier(*shape, **recipe.encoder_options())


def summarise(recipe: Recipe, name: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean and sample deviation over the seeds."""
    metric = "accuracy" if "accuracy" in results[0] else "rmse"
    values = [result[metric] for result in results]
    return {
        "recipe": name,
        "dataset": recipe.dataset,
        "attention": recipe.attention_name(),
        "protocol": recipe.protocol,
        "protocol_text": PROTOCOLS[recipe.protocol],
        "seeds": recipe.seeds,
        "metric": metric,
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


def _open_folder(output: Path, recipe: Recipe, facts: dict[str, Any], name: str) -> None:
    """Make the run folder; failing, leave all as it was. ``config.yaml`` comes last: it makes it a run."""
    created = [folder for folder in (output, *output.parents) if not folder.exists()]
    try:
        output.mkdir(parents=True, exist_ok=True)
        remove_unfinished(output)
        write_json(output / "versions.json", {"recipe": name, **_versions()})
        write_json(output / "data.json", facts)
        write_yaml(output / "config.yaml", dataclasses.asdict(recipe))
    except BaseException as error:
        with contextlib.suppress(OSError):
            for file in ("versions.json", "data.json", "config.yaml"):
                (output / file).unlink(missing_ok=True)
            for folder in created:
                folder.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"output {output}: cannot be written ({error.strerror or error})") from None
        raise


def _reopen_folder(output: Path, facts: dict[str, Any]) -> str | None:
    """Make an unfinished run ready to go on; the name of its recipe."""
    require_same_data(facts, read_facts(output))
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


def _split(data: TimeSeriesData, recipe: Recipe, seed: int) -> tuple[SequenceSplit, SequenceSplit]:
    """(training cases, cases that choose the epoch) under the recipe's protocol."""
    if recipe.protocol == "paper":
        return data.train, data.test
    return stratified_split(data.train, recipe.validation_fraction, seed, data.task)


def _train_seed(
    recipe: Recipe, data: TimeSeriesData, folder: Path, seed: int, progress: bool
) -> dict[str, Any]:
    if (folder / "evaluation.json").exists():  # a finished seed of a resumed run
        return read_json(folder / "evaluation.json")
    folder.mkdir(exist_ok=True)
    L.seed_everything(seed, verbose=False)
    train_split, val_split = _split(data, recipe, seed)
    scale = Standardizer.fit(train_split.sequences)
    model = build_model(recipe, describe_data(data))
    model.encoder.set_scale(torch.from_numpy(scale.mean), torch.from_numpy(scale.std))
    is_regression = data.task == "regression"
    recorder = RunRecorder(folder, float(np.var(val_split.targets)) if is_regression else None)
    fit(
        SequenceTask(model, recipe, is_regression),
        make_loader(train_split, recipe.batch_size, shuffle=True, seed=seed),
        make_loader(val_split, recipe.batch_size),
        callbacks=[recorder],
        checkpoint=recorder.checkpoint if recorder.checkpoint.exists() else None,
        progress=progress,
    )
    model.load_state_dict(read_weights(folder / "best.safetensors"))
    result = evaluate_split(model, data.test, recipe, is_regression)
    if not math.isfinite(result["loss"]):
        raise FloatingPointError(f"the loss on the test split is {result['loss']}")
    result |= {
        "protocol": recipe.protocol,
        "split": "test",
        "best_epoch": recorder.best_epoch,
        "seconds": round(sum(row["seconds"] for row in recorder.rows), 1),
    }
    write_json(folder / "spectra.json", kernel_spectra(model, data.test))
    write_json(folder / "evaluation.json", result)
    return result
