"""A process that trains in children of its own and kills them at chosen writes; ``test_resume`` runs it.

``python killed.py DATA FOLDER PLANS`` reads a JSON list of plans and prints for each how many processes were
killed. A plan has one entry for each process of a run in turn: [number of the write, moment]. Importing
takes seconds and forking milliseconds, and a process of one thread can be forked.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import lightning_fabric  # noqa: F401  (what a child would import otherwise)
import torch
from runs.small_runs import assert_same_outcome, write_recipe

from kernel_attention_lab.cli import main
from kernel_attention_lab.runs import run

MOMENTS = ("torn", "written", "renamed")
"""Half of the file is on the disk; all of it, not yet renamed; renamed just now."""


def count_writes(limit: int, act: Callable[[], None], moment: str) -> Callable[[], int]:
    """Call ``act`` in the given moment of the ``limit``-th atomic write; returns a counter of the writes."""
    replace, fsync, done = os.replace, os.fsync, 0

    def counting_fsync(descriptor: int) -> None:
        if moment == "torn" and done == limit - 1:
            os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)
            act()
        fsync(descriptor)

    def counting_replace(source: object, target: object) -> None:
        nonlocal done
        if moment == "written" and done == limit - 1:
            act()
        replace(source, target)
        done += 1
        if moment == "renamed" and done == limit:
            act()

    os.replace, os.fsync = counting_replace, counting_fsync
    return lambda: done


def in_child(arguments: list[str], kill: tuple[int, str] | None = None, report: Path | None = None) -> int:
    """Exit code of the command line in a child, killed as ``kill`` says; -9 if it was."""
    child = os.fork()
    if child == 0:
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, 1)
        limit, moment = kill or (0, "renamed")
        written = count_writes(limit, lambda: os.kill(os.getpid(), signal.SIGKILL), moment)
        code = main(arguments)
        if report is not None:
            report.write_text(str(written()))
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train_through(folder: Path, begin: list[str], root: str, kills: list[tuple[int, str]]) -> int:
    """Train to the end although killed; how many processes were killed."""
    for killed, kill in enumerate([*kills, None]):
        resume = ["train", "--resume", str(folder), "--data-root", root, "--progress", "false"]
        code = in_child(resume if (folder / "config.yaml").exists() else begin, kill)
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, f"exit code {code} after {killed} kills"
    raise AssertionError("the last process was not to be killed")


if __name__ == "__main__":
    root, work, plans = sys.argv[1], Path(sys.argv[2]), json.loads(sys.argv[3])
    torch.set_num_threads(1)
    run.write_report = lambda folder: (folder / "report.html").write_text("<html>")
    recipe = write_recipe(work / "run.yaml", epochs=2, seeds=[0, 1])
    begin = ["train", str(recipe), "--data-root", root, "--progress", "false", "--output"]
    assert in_child([*begin, str(work / "reference")], report=work / "writes") == 0
    writes = int((work / "writes").read_text())
    if plans == "everywhere":
        plans = [[(write, moment)] for write in range(1, writes + 1) for moment in MOMENTS]
    for number, plan in enumerate(plans):
        folder = work / f"run-{number}"
        killed = train_through(folder, [*begin, str(folder)], root, [tuple(kill) for kill in plan])
        assert_same_outcome(folder, work / "reference")
        print(json.dumps({"killed": killed, "writes": writes}), flush=True)
        shutil.rmtree(folder)
