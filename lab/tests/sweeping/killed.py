"""A process that runs sweeps in children of its own and kills them; ``test_killed`` runs it.

``python killed.py DATA FOLDER MODE KILLS`` prints a JSON object. Importing takes seconds and forking
milliseconds, and a process of one thread can be forked.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import lightning_fabric  # noqa: F401  (what a child would import otherwise)
import torch
from runs.small_runs import assert_same_outcome
from sweeping.sweeps import endings, small_sweep

from kernel_attention_lab.runs import run
from kernel_attention_lab.sweeping import join_sweep, open_sweep, study, workers

GRID = ["learning_rate=0.001,0.01", "attention=[softmax, linear]"]


def start_worker(folder: Path, log: Path, limit: int = 0) -> int:
    """Fork a worker, killed right after its ``limit``-th atomic write; 0 is never. Its process number.

    Points that begin are lines of ``log``; every write adds a byte to the file that ``writes_of`` measures.
    """
    child = os.fork()
    if child:
        return child
    replace, train, done = os.replace, workers.train, 0

    def counting_replace(source: object, target: object) -> None:
        nonlocal done
        replace(source, target)
        done += 1
        append(log.with_suffix(".writes"), ".")
        if done == limit:
            os.kill(os.getpid(), signal.SIGKILL)

    def logged_train(recipe: object, output: Path, **options: object) -> object:
        append(log, f"{output.name} {'again' if options['resume'] else 'new'}\n")
        return train(recipe, output, **options)

    os.replace, workers.train = counting_replace, logged_train
    code = 1
    try:
        join_sweep(folder)
        code = 0
    finally:
        os._exit(code)


def append(path: Path, text: str) -> None:
    """In one system call, so that nothing of two writers mixes."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, text.encode())
    os.close(descriptor)


def writes_of(log: Path) -> int:
    """How many atomic writes the workers of this log have made, all together."""
    return log.with_suffix(".writes").stat().st_size if log.with_suffix(".writes").exists() else 0


def exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def kill_at_writes(folder: Path, log: Path, kills: int, writes: int, draws: random.Random) -> int:
    """One worker after another, each killed after a few writes; then one that ends the sweep."""
    for _ in range(kills):
        assert exit_code(start_worker(folder, log, draws.randint(1, writes // (kills + 1)))) == -9
    assert exit_code(start_worker(folder, log)) == 0
    return kills


def kill_at_times(folder: Path, log: Path, kills: int, writes: int, draws: random.Random) -> int:
    """Two workers at a time; one of them is killed at a random time, and another comes in its place.

    One worker makes ``writes`` atomic writes in the sweep. Two make about a quarter as many between the first
    kill and the last, on however busy a machine, so that they do not finish the sweep before.
    """
    killed, workers, sweep = 0, [start_worker(folder, log), start_worker(folder, log)], open_sweep(folder)
    while killed < kills and sweep.unfinished():
        enough = writes_of(log) + draws.randint(0, writes // (2 * kills))
        while writes_of(log) < enough and sweep.unfinished():
            time.sleep(0.005)
        time.sleep(draws.uniform(0, 0.02))
        victim = workers.pop(draws.randrange(2))
        os.kill(victim, signal.SIGKILL)
        killed += exit_code(victim) == -9
        workers.append(start_worker(folder, log))
    assert [exit_code(child) for child in workers] == [0, 0]
    return killed


if __name__ == "__main__":
    root, work, mode, kills = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    study.BEAT, study.GRACE, workers.POLL = 1, 2, 0.1
    run.write_report = lambda folder: (folder / "report.html").write_text("<html>")
    keys = {"epochs": 1 if mode == "writes" else 30}
    for name in ("reference", "sweep"):
        small_sweep(work / name, root, GRID, keys=keys)
    children = [start_worker(work / "reference", work / "reference.log") for _ in range(1 + (kills == 0))]
    assert [exit_code(child) for child in children] == [0] * len(children)
    killed = 0
    if kills:
        act = kill_at_writes if mode == "writes" else kill_at_times
        writes = writes_of(work / "reference.log")
        killed = act(work / "sweep", work / "sweep.log", kills, writes, random.Random(0))
        for number in range(4):
            point = f"points/{number:03d}"
            assert_same_outcome(work / "sweep" / point, work / "reference" / point)
    name = "sweep" if kills else "reference"
    folder = work / name
    print(
        json.dumps(
            {
                "killed": killed,
                "completed": [endings(folder)[number] for number in range(4)],
                "values": [point.value for point in open_sweep(folder).points()],
                "reference": [point.value for point in open_sweep(work / "reference").points()],
                "trained": sorted((work / f"{name}.log").read_text().splitlines()),
                "left": sorted(path.name for path in (folder / "points").glob(".*")),
            }
        )
    )
