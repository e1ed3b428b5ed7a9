"""Run a sweep here: in this process, or in several of this machine."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from kernel_attention.atomic import is_unfinished
from kernel_attention.errors import InputError
from kernel_attention.notes import note, notes_on_stderr
from kernel_attention_lab.child_process import stop_with_parent
from kernel_attention_lab.plugins import load_plugins, loaded_plugins
from kernel_attention_lab.reporting.sweep_record import SweepRecord
from kernel_attention_lab.sweeping.space import space_as_json
from kernel_attention_lab.sweeping.study import POINTS, SweepFolder, open_sweep
from kernel_attention_lab.sweeping.worker import check_machine, work


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
        check_machine(sweep, sweep.data_root(data_root))
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


def sweep_record(sweep: SweepFolder, with_importances: bool = True) -> SweepRecord:
    """The sweep and its points as they are now, for tables and the report.

    Args:
        sweep: an open folder.
        with_importances: also compute the share of each key, which takes seconds with many points.
    """
    plan = sweep.plan
    recipe = plan.example()
    return SweepRecord(
        recipe=plan.recipe,
        dataset=recipe.dataset,
        protocol=recipe.protocol,
        protocol_text=recipe.protocol_text,
        metric=plan.metric.name,
        split="validation" if recipe.protocol == "holdout" else recipe.reported_split,
        larger_is_better=plan.metric.larger_is_better,
        space=space_as_json(plan.space),
        sampler=plan.sampler,
        sampler_seed=plan.sampler_seed,
        seeds=recipe.seeds,
        points=sweep.points(),
        importances=sweep.importances() if with_importances else None,
        command=resume_command(sweep.folder),
    )


def resume_command(folder: Path) -> str:
    """The command that goes on with a sweep, on this machine or on another that sees the folder."""
    plugins = "".join(f" --plugin {name}" for name in loaded_plugins())
    return f"kernel-attention sweep --resume {shlex.quote(str(folder))}{plugins}"


def _run_processes(sweep: SweepFolder, workers: int, data_root: str | None) -> None:
    context = multiprocessing.get_context("spawn")
    arguments = (str(sweep.folder), data_root, loaded_plugins(), os.getpid())
    processes = [context.Process(target=_worker_main, args=arguments) for _ in range(workers)]
    with _sigterm_as_interrupt():
        try:
            for process in processes:
                process.start()
            for process in processes:
                process.join()
        except BaseException:
            _stop(processes)
            raise
    for number, process in enumerate(processes):
        if process.exitcode:
            how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
            print(f"worker {number} ended early ({how})", file=sys.stderr)
    if sweep.unfinished():
        raise ChildProcessError("every worker ended before the last point was finished")


def _stop(processes: Sequence[Any]) -> None:
    """Ask every worker to stop at a checkpoint, and wait for it."""
    started = [process for process in processes if process.pid is not None]
    for process in started:
        process.terminate()
    for process in started:
        process.join()


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


@contextlib.contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C, so that a cluster that ends a job ends its workers at their checkpoints."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
