"""Workers: processes that run points of a sweep until none is left, here and on other machines."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import statistics
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from optuna.trial import Trial, TrialState

from kernel_attention.errors import InputError, note
from kernel_attention.files import is_unfinished
from kernel_attention.training.loop import check_trainer
from kernel_attention_lab.child_process import stop_with_parent
from kernel_attention_lab.extras import install_hint
from kernel_attention_lab.lock import HeldByAnother
from kernel_attention_lab.notes import notes_on_stderr
from kernel_attention_lab.plugins import load_plugins, loaded_plugins
from kernel_attention_lab.run_folder import RunFolder
from kernel_attention_lab.runs.launch import with_precision
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.runs.saved import read_config
from kernel_attention_lab.sweeping.study import GRACE, POINTS, SweepFolder, open_sweep, storing
from kernel_attention_lab.tasks.experiment import Metric
from kernel_attention_lab.tasks.recipe import BaseRecipe
from kernel_attention_lab.tasks.registry import experiment_class

POLL = 1.0  # seconds until a worker without a point looks again


class _PointFailed(Exception):
    """A point cannot be run; its trial has the reason."""


def run_sweep(sweep: SweepFolder, workers: int = 1, data_root: str | None = None) -> None:
    """Run the points of a sweep until none is left: one worker in this process, several in their own.

    Args:
        sweep: an open folder.
        workers: number of workers.
        data_root: the folder that is searched first for data sets; by default that of the sweep's start.

    Raises:
        InputError: where this machine lacks the data or the accelerator.
        KeyboardInterrupt: Ctrl-C or SIGTERM; every point that had begun is saved.
        ChildProcessError: where all workers ended before the points did.
        OSError: the folder can no longer be written.
    """
    if workers == 1:
        work(sweep, data_root)
    else:
        _check_machine(sweep, sweep.data_root(data_root))
        if sweep.plan.keys["threads"] == 0:
            note(f"{workers} workers share this machine, and each takes all its cores: give --threads")
        _run_processes(sweep, workers, data_root)
    for path in (sweep.folder / POINTS).glob(".*.tmp"):  # of killed workers
        if is_unfinished(path):
            path.unlink(missing_ok=True)


def join_sweep(folder: str | Path, data_root: str | None = None) -> None:
    """Work on a sweep folder as one more worker, until no point is left: a job of a cluster's queue.

    Args:
        folder: which ``kernel-attention sweep`` began, on a file system that all machines see.
        data_root: the folder that is searched first for data sets; by default that of the sweep's start.

    Raises:
        InputError: for a folder without a sweep, and where this machine lacks the data or the accelerator.
        KeyboardInterrupt: Ctrl-C or SIGTERM; the point is saved and free.
        OSError: the folder can no longer be written.
    """
    work(open_sweep(Path(folder)), data_root)


def work(sweep: SweepFolder, data_root: str | None = None) -> None:
    """Run points until every point of the sweep is complete or failed; errors are those of ``join_sweep``.

    A worker that finds no free point waits for the others: it takes over the points of those that die. So a
    sweep ends as long as one worker lives.
    """
    data_root = sweep.data_root(data_root)
    _check_machine(sweep, data_root)
    begun: list[int] = []
    is_told = False

    def objective(trial: Trial) -> float:
        begun.append(trial.number)
        return _run_point(sweep, trial, data_root)

    with storing(sweep.folder):
        while sweep.unfinished():
            if sweep.offer():
                try:
                    sweep.study.optimize(objective, n_trials=1, catch=(_PointFailed,))
                except ValueError:  # this machine stood still, and another worker took the trial for lost
                    if sweep.study.get_trials(deepcopy=False)[begun[-1]].state == TrialState.RUNNING:
                        raise
                continue
            if not begun and not is_told:
                note(f"no point is free now; one is when its worker has been silent for {GRACE} s")
                is_told = True
            time.sleep(POLL)


def measured_values(folder: Path, recipe: BaseRecipe, metric: Metric) -> list[float]:
    """The metric of every seed of a finished run, in the epoch that its protocol chose.

    Raises:
        InputError: for a run that lacks it.
    """
    run, values = RunFolder(folder), []
    for seed in recipe.seeds:
        chosen = (run.evaluation(seed) or {}).get("best_epoch")
        rows = [row for row in run.metrics(seed) or [] if row.get("epoch") == chosen and chosen is not None]
        if not rows or rows[0].get(metric.name) is None:
            raise InputError(f"run {folder}: has no {metric.name} of the chosen epoch of seed {seed}")
        values.append(float(rows[0][metric.name]))
    return values


def _check_machine(sweep: SweepFolder, data_root: str | None) -> None:
    """InputError where this machine cannot train a sweep's recipe, or does not have its data."""
    recipe = with_precision(sweep.plan.example())
    check_trainer(recipe.train_settings())
    experiment_class(recipe.task_name)(recipe, data_root)


def _run_point(sweep: SweepFolder, trial: Trial, data_root: str | None) -> float:
    """Train a trial's point to its end, from its last checkpoint where an earlier trial left one."""
    number = trial.user_attrs.get("point")
    if number is None:  # another worker took the last trial that waited, just before
        raise _PointFailed
    keys, folder = sweep.choose(trial), sweep.point_folder(number)
    try:
        values = _train(sweep, keys, folder, data_root)
    except (OSError, KeyboardInterrupt):
        raise
    except Exception as error:
        if isinstance(error.__context__, OSError):  # a folder that cannot be written, worded by `train`
            raise error.__context__ from None
        if isinstance(error, ModuleNotFoundError) and install_hint(error, "this sweep") is not None:
            raise
        reason = " ".join(str(error).split())
        if not isinstance(error, InputError):
            reason = f"{type(error).__name__}: {reason}"
        if not isinstance(error, InputError | FloatingPointError) and folder.is_dir():
            with contextlib.suppress(OSError):
                (folder / "error.txt").write_text("".join(traceback.format_exception(error)))
        trial.set_user_attr("error", reason)
        print(f"point {number}: {reason}", file=sys.stderr)
        raise _PointFailed from error
    trial.set_user_attr("values", values)
    return statistics.fmean(values)


def _train(sweep: SweepFolder, keys: dict[str, Any], folder: Path, data_root: str | None) -> list[float]:
    recipe = sweep.plan.make(keys)
    while True:
        resume = RunFolder(folder).config_path.is_file()
        if resume:
            recipe = read_config(folder)
        try:
            train(recipe, folder, name=sweep.plan.recipe, data_root=data_root, resume=resume, progress=False)
            return measured_values(folder, recipe, sweep.plan.metric)
        except HeldByAnother:  # a `train` of the user's, or a worker that was taken for dead
            time.sleep(POLL)


def _run_processes(sweep: SweepFolder, workers: int, data_root: str | None) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(sweep.folder), data_root, loaded_plugins(), os.getpid())
    processes = [context.Process(target=_worker_main, args=arguments) for _ in range(workers)]
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    except BaseException:  # each worker stops at a checkpoint
        started = [process for process in processes if process.pid is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.join()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    for number, process in enumerate(processes):
        if code := process.exitcode:
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            print(f"worker {number} ended early ({how})", file=sys.stderr)
    if sweep.unfinished():
        raise ChildProcessError("every worker ended before the last point was finished")


def _worker_main(folder: str, data_root: str | None, plugins: list[str], parent: int) -> None:
    """The main function of a worker's process; its exit code is that of the command line."""
    if hasattr(os, "setsid"):
        os.setsid()  # Ctrl-C reaches the process that started this one, which passes it on once
    stop_with_parent(parent)
    with notes_on_stderr():
        try:
            load_plugins(plugins)
            join_sweep(folder, data_root)
        except KeyboardInterrupt:
            sys.exit(1)
        except (InputError, OSError) as error:
            print(f"worker: {' '.join(str(error).split())}", file=sys.stderr)
            sys.exit(2 if isinstance(error, InputError) else 1)
