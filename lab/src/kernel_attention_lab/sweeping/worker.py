"""A worker: one process that runs points of a sweep until none is left."""

from __future__ import annotations

import contextlib
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError
from kernel_attention.training.devices import with_precision
from kernel_attention.training.loop import check_trainer
from kernel_attention_lab.extras import install_hint
from kernel_attention_lab.lock import HeldByAnother
from kernel_attention_lab.run_folder import RunFolder
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.runs.saved import read_config
from kernel_attention_lab.sweeping.lease import Watch, leased
from kernel_attention_lab.sweeping.study import POINTS, SweepFolder
from kernel_attention_lab.tasks.experiment import Metric
from kernel_attention_lab.tasks.recipe import BaseRecipe
from kernel_attention_lab.tasks.registry import experiment_class

POLL = 1.0  # seconds until a worker without a point looks again


def work(sweep: SweepFolder, data_root: str | None = None, watch: Watch | None = None) -> None:
    """Run points until every point of the sweep is complete or failed.

    A worker that finds no free point waits for the others: it takes over the points of those that die. So a
    sweep ends as long as one worker lives.

    Args:
        sweep: an open folder.
        data_root: the folder that is searched first for data sets; by default that of the sweep's start.
        watch: of other machines' heartbeats.

    Raises:
        InputError: where this machine lacks the data or the accelerator; no point is touched.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the point is saved and free.
        OSError: the folder can no longer be written.
    """
    watch = watch or Watch()
    data_root = sweep.data_root(data_root)
    check_machine(sweep, data_root)
    while unfinished := sweep.unfinished():
        if not any(_try_point(sweep, number, data_root, watch) for number in unfinished):
            time.sleep(POLL)


def check_machine(sweep: SweepFolder, data_root: str | None) -> None:
    """InputError where this machine cannot train a sweep's recipe, or does not have its data."""
    recipe = with_precision(sweep.plan.example())
    check_trainer(recipe.train_settings())
    experiment_class(recipe.task_name)(recipe, data_root)


def measured_values(folder: Path, recipe: BaseRecipe, metric: Metric) -> list[float]:
    """The metric of every seed of a finished run, in the epoch that its protocol chose.

    Raises:
        InputError: for a run that lacks it.
    """
    run, values = RunFolder(folder), []
    for seed in recipe.seeds:
        chosen = (run.evaluation(seed) or {}).get("best_epoch")
        row: dict[str, Any] = next(
            (row for row in run.metrics(seed) or [] if row.get("epoch") == chosen and chosen is not None), {}
        )
        if row.get(metric.name) is None:
            raise InputError(f"run {folder}: has no {metric.name} of the chosen epoch of seed {seed}")
        values.append(float(row[metric.name]))
    return values


def _try_point(sweep: SweepFolder, number: int, data_root: str | None, watch: Watch) -> bool:
    """Run a point to its end; False where another process has it, or finished it just now."""
    with leased(sweep.folder / POINTS, f"{number:03d}", watch) as lease:
        if lease is None or not sweep.begin(number):
            return False
        try:
            values = _run_point(sweep, number, data_root)
        except HeldByAnother:  # a `train` of the user's in the point's own folder
            return False
        except (OSError, KeyboardInterrupt):
            raise
        except Exception as error:
            if isinstance(error.__context__, OSError):  # a folder that cannot be written, worded by `train`
                raise error.__context__ from None
            if isinstance(error, ModuleNotFoundError) and install_hint(error, "this sweep") is not None:
                raise
            if lease.is_held():
                _give_up(sweep, number, error)
            return True
        if lease.is_held():
            sweep.complete(number, values)
        return True


def _run_point(sweep: SweepFolder, number: int, data_root: str | None) -> list[float]:
    folder = sweep.point_folder(number)
    recipe = sweep.plan.make(sweep.keys(number))
    resume = RunFolder(folder).config_path.is_file()
    if resume:
        recipe = read_config(folder)
    train(recipe, folder, name=sweep.plan.recipe, data_root=data_root, resume=resume, progress=False)
    return measured_values(folder, recipe, sweep.plan.metric)


def _give_up(sweep: SweepFolder, number: int, error: Exception) -> None:
    """Record why a point failed, with the traceback in its folder where the failure was not foreseen."""
    reason = " ".join(str(error).split())
    if not isinstance(error, InputError):
        reason = f"{type(error).__name__}: {reason}"
    folder = sweep.point_folder(number)
    if not isinstance(error, InputError | FloatingPointError) and folder.is_dir():
        with contextlib.suppress(OSError):
            (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
    sweep.fail(number, reason)
    print(f"point {number}: {reason}", file=sys.stderr)
