"""Every point is completed exactly once, by two workers, and by workers that are killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs.small_runs import SRC

HERE = Path(__file__).parent
POINTS = ["000", "001", "002", "003"]


def run_killed(root: Path, work: Path, mode: str, kills: int) -> dict:
    path = os.pathsep.join([str(SRC), str(HERE.parent)])
    process = subprocess.run(
        [sys.executable, str(HERE / "killed.py"), str(root), str(work), mode, str(kills)],
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert process.returncode == 0, process.stderr
    return json.loads(process.stdout.splitlines()[-1])


@pytest.mark.slow  # test_sweep.py has two workers too
def test_two_workers_train_every_point_once(waves, tmp_path):
    found = run_killed(waves, tmp_path, "writes", 0)
    assert found["trained"] == [f"{point} new" for point in POINTS]
    assert found["completed"] == [1, 1, 1, 1]


def check(found: dict, kills: int) -> None:
    assert found["killed"] == kills
    assert found["completed"] == [1, 1, 1, 1]
    assert found["values"] == found["reference"]
    assert {line.split()[0] for line in found["trained"]} == set(POINTS)
    assert found["left"] == [], "nothing of a dead worker is left"


@pytest.mark.slow
def test_killed_at_three_writes(waves, tmp_path):
    found = run_killed(waves, tmp_path, "writes", 3)
    check(found, 3)
    assert len(found["trained"]) <= 4 + 3, "a point that was killed goes on, and no other begins again"


@pytest.mark.slow
def test_killed_twenty_times_at_random(waves, tmp_path):
    check(run_killed(waves, tmp_path, "times", 20), 20)
