"""A run killed at any moment and resumed ends as if it had never been killed, bit for bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runs.small_runs import SRC, assert_same_outcome, launch, write_recipe

from kernel_attention_lab.cli import main

TESTS = Path(__file__).parents[1]
MOMENTS = ("torn", "written", "renamed")


def killed(data: Path, folder: Path, plans: object) -> list[dict]:
    """What ``killed.py`` reports of the runs it killed by these plans."""
    process = subprocess.run(
        [sys.executable, str(TESTS / "runs" / "killed.py"), str(data), str(folder), json.dumps(plans)],
        env=os.environ | {"PYTHONPATH": f"{SRC}{os.pathsep}{TESTS}", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.parametrize(
    "plan",
    [
        pytest.param([(1, "torn")], marks=pytest.mark.slow),
        [(9, "written"), (5, "renamed"), (1, "torn")],
        pytest.param([(15, "renamed"), (2, "torn")], marks=pytest.mark.slow),
    ],
    ids=["first file", "often", "finished seed"],
)
def test_killed_in_the_middle_of_a_write(waves, tmp_path, plan):
    assert [row["killed"] for row in killed(waves, tmp_path, [plan])] == [len(plan)]


@pytest.mark.slow
def test_killed_in_every_write(waves, tmp_path):
    rows = killed(waves, tmp_path, "everywhere")
    assert len(rows) == 3 * rows[0]["writes"] > 60
    assert {row["killed"] for row in rows} == {1}


@pytest.mark.slow
def test_killed_again_and_again(waves, tmp_path):
    """Twelve times each, wherever chance has it."""
    generator = random.Random(0)
    plans = [[(generator.randint(1, 7), generator.choice(MOMENTS)) for _ in range(12)] for _ in range(10)]
    rows = killed(waves, tmp_path, plans)
    assert sum(row["killed"] for row in rows) >= 60


def seeds_trained(folder: Path) -> list[Path]:
    return sorted(folder.glob("seed-*"))


def stop_in_checkpoint(process: subprocess.Popen, folder: Path, after: int) -> bool:
    """SIGKILL while a checkpoint is being written, ``after`` finished ones; whether it came in time."""
    seen: set[tuple[str, int]] = set()
    while process.poll() is None:
        for seed in seeds_trained(folder):
            if len(seen) >= after and any(seed.glob(".last.ckpt.*")):
                process.send_signal(signal.SIGSTOP)
                is_within = any(seed.glob(".last.ckpt.*"))
                end(process)
                return is_within
            with contextlib.suppress(FileNotFoundError):
                seen.add((seed.name, (seed / "last.ckpt").stat().st_ino))
        time.sleep(0.0003)
    process.communicate()
    return False


def stop_at(process: subprocess.Popen, seconds: float) -> bool:
    """SIGKILL after so many seconds of processor time; whether the process was still running."""
    while process.poll() is None:
        if processor_seconds(process.pid) >= seconds:
            end(process)
            return True
        time.sleep(0.002)
    process.communicate()
    return False


def processor_seconds(pid: int) -> float:
    """What a process has used: unlike the clock, it says how far it is whatever else the machine does."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def children_seconds() -> float:
    """The same of all children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end(process: subprocess.Popen) -> None:
    process.kill()
    process.communicate()


class Runs:
    """Real processes that train one recipe on JapaneseVowels."""

    def __init__(self, tmp_path: Path, **changes: object) -> None:
        sizes = {"dataset": "JapaneseVowels", "embed_dim": 96, "feedforward_dim": 192, "batch_size": 32}
        self.recipe = write_recipe(tmp_path / "run.yaml", **sizes | {"epochs": 6} | changes)
        self.folder = tmp_path / "run"

    def start(self, folder: Path | None = None) -> subprocess.Popen:
        """A process that begins the run or resumes it, whichever is due."""
        folder = folder or self.folder
        if (folder / "config.yaml").exists():
            return launch("train", "--resume", folder, "--progress", "false")
        return launch("train", self.recipe, "--output", folder, "--progress", "false")

    def finish(self, folder: Path | None = None) -> None:
        process = self.start(folder)
        err = process.communicate()[1]
        assert process.returncode == 0, err


@pytest.mark.slow
def test_killed_and_interrupted_as_a_real_process(tmp_path):
    """SIGKILL in a checkpoint's write, then Ctrl-C, then on to the end."""
    runs, reference = Runs(tmp_path), tmp_path / "reference"
    arguments = ["train", str(runs.recipe), "--output", str(reference), "--progress", "false"]
    assert main(arguments) == 0
    process = runs.start()
    stop_in_checkpoint(process, runs.folder, after=2)
    assert process.returncode == -signal.SIGKILL

    process = runs.start()
    state = (runs.folder / "seed-0/last.ckpt").stat().st_ino
    while (runs.folder / "seed-0/last.ckpt").stat().st_ino == state:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal.SIGINT)
    err = process.communicate(timeout=120)[1]
    assert process.returncode == 1
    said = [line for line in err.splitlines() if not line.startswith("note: ")]
    assert said[0] == "interrupted"
    assert re.fullmatch(
        rf"saved: {re.escape(str(runs.folder))} \(seed 0: checkpoint after step \d+\)", said[1]
    )
    assert said[2:] == [f"resume: kernel-attention train --resume {runs.folder}"]
    runs.finish()
    assert_same_outcome(runs.folder, reference)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="/proc says how far a process is")
def test_killed_ten_times_as_a_real_process(tmp_path):
    """Two seeds; six kills or more at random moments, four or more inside a checkpoint's write."""
    generator = random.Random(0)
    runs, reference = Runs(tmp_path, seeds=[0, 1]), tmp_path / "reference"
    before = children_seconds()
    runs.finish(reference)
    duration = children_seconds() - before
    anywhere = within = rounds = 0
    while anywhere < 6 or within < 4:
        rounds += 1
        assert rounds < 60, f"{anywhere} kills at random moments, {within} in a checkpoint's write"
        process = runs.start()
        if anywhere < 6 and (rounds % 2 or within >= 4):
            anywhere += stop_at(process, generator.uniform(0.4, 0.9) * duration)
        else:
            within += stop_in_checkpoint(process, runs.folder, after=generator.randint(0, 2))
        if (runs.folder / "summary.json").exists():  # done before its time: another run takes the other kills
            runs.finish()
            assert_same_outcome(runs.folder, reference)
            runs.folder = tmp_path / f"run-{rounds}"
    runs.finish()
    assert_same_outcome(runs.folder, reference)
    print(f"killed at random moments: {anywhere}, inside a checkpoint's write: {within}, processes: {rounds}")
