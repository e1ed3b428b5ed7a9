"""The cells of a suite, one after the other or by several processes."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import NamedTuple

from kernel_attention.errors import InputError, require_positive
from kernel_attention_lab.child_process import stop_with_parent
from kernel_attention_lab.evidence.run import OnProgress, Places, find_state, run_cell
from kernel_attention_lab.evidence.suite import Cell, Suite
from kernel_attention_lab.plugins import load_plugins

_THREADS = "OMP_NUM_THREADS"


class Failure(NamedTuple):
    """A cell that could not be done, and why; ``is_input`` for bad data or a bad recipe."""

    cell: Cell
    reason: str
    is_input: bool


class Outcome(NamedTuple):
    """The cells that failed, those that another process works on, and how many of the workers died."""

    failures: tuple[Failure, ...]
    left: tuple[Cell, ...]
    dead: int
    workers: int


def run_cells(
    suite: Suite,
    cells: Sequence[Cell],
    places: Places,
    on_progress: OnProgress,
    *,
    workers: int = 1,
    plugins: Sequence[str] = (),
) -> Outcome:
    """Do what the cells lack; a cell that fails does not stop the others.

    Args:
        suite: the suite.
        cells: in the order in which they are begun.
        places: where the suite works.
        on_progress: gets a line about what is going on.
        workers: processes, at most one for each cell that lacks something. Each goes through all cells, and
            passes over those that are done or that another holds. Unless ``OMP_NUM_THREADS`` says otherwise,
            each gets the cores divided by this number.
        plugins: modules that a worker imports first.

    Raises:
        InputError: for a number of workers below 1.
    """
    require_positive(workers=workers)
    if workers == 1:
        failures, dead = _in_this_process(suite, cells, places, on_progress), 0
    else:
        with _shared_cores(workers):  # a training's share does not depend on how many cells are left
            workers = min(workers, sum(_lacks(suite, cell, places) for cell in cells))
            failures, dead = _by_workers(suite, cells, places, on_progress, workers, plugins)
    failed = {failure.cell for failure in failures}
    others = [cell for cell in cells if cell not in failed]
    left = [cell for cell in others if not find_state(suite, cell, places).is_done]
    return Outcome(tuple(failures), tuple(left), dead, workers)


def _lacks(suite: Suite, cell: Cell, places: Places) -> bool:
    try:
        return not find_state(suite, cell, places).is_done
    except InputError:  # the worker that meets it says so
        return True


def _in_this_process(
    suite: Suite, cells: Sequence[Cell], places: Places, on_progress: OnProgress
) -> list[Failure]:
    failures = []
    for cell in cells:
        try:
            run_cell(suite, cell, places, on_progress)
        except InputError as error:
            failures.append(Failure(cell, " ".join(str(error).split()), True))
        except ModuleNotFoundError:
            raise  # a missing extra is named by the command line
        except Exception as error:  # a diverged training, say: the other cells are independent of it
            failures.append(Failure(cell, " ".join(f"{type(error).__name__}: {error}".split()), False))
    return failures


def _by_workers(
    suite: Suite,
    cells: Sequence[Cell],
    places: Places,
    on_progress: OnProgress,
    workers: int,
    plugins: Sequence[str],
) -> tuple[list[Failure], int]:
    context = multiprocessing.get_context("spawn")  # a fork of a process with threads can hang
    running: dict[Connection, SpawnProcess] = {}
    failures: dict[Cell, Failure] = {}
    dead = 0
    try:
        for _ in range(workers):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_work, args=(suite, cells, places, writer, plugins, os.getpid()))
            process.start()
            writer.close()  # so that the pipe ends with the worker, however it ends
            running[reader] = process
        while running:
            for reader in [pipe for pipe in wait(list(running)) if isinstance(pipe, Connection)]:
                try:
                    said = reader.recv()
                except EOFError:
                    process = running.pop(reader)
                    process.join()
                    dead += process.exitcode != 0
                    continue
                if isinstance(said, str):
                    on_progress(said)
                else:
                    failures |= {failure.cell: failure for failure in said}
    finally:
        for process in running.values():
            process.terminate()
            process.join()
    return list(failures.values()), dead


def _work(
    suite: Suite,
    cells: Sequence[Cell],
    places: Places,
    writer: Connection,
    plugins: Sequence[str],
    parent: int,
) -> None:
    stop_with_parent(parent)
    with contextlib.suppress(KeyboardInterrupt):
        load_plugins(plugins)
        writer.send(_in_this_process(suite, cells, places, writer.send))


@contextlib.contextmanager
def _shared_cores(workers: int) -> Iterator[None]:
    """Give processes that start here their share of the cores."""
    if _THREADS in os.environ:
        yield
        return
    os.environ[_THREADS] = str(max((os.cpu_count() or 1) // workers, 1))
    try:
        yield
    finally:
        del os.environ[_THREADS]
