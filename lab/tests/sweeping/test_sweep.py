"""A sweep from the command line: every point once, compared on validation data, resumed, reported."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from optuna.trial import TrialState
from runs.small_runs import BRIEF, write_recipe
from sweeping.sweeps import endings

from kernel_attention_lab import cli
from kernel_attention_lab.sweeping import open_sweep

GRID = ("--grid", "learning_rate=0.001,0.01", "--grid", "attention=[softmax, {primal: {rank: 2, eta: 0.1}}]")


@pytest.fixture
def sweep(tmp_path: Path, waves: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the command on a tiny recipe; its exit code."""
    recipe = write_recipe(tmp_path / "small.yaml", epochs=2, num_layers=1)
    monkeypatch.setenv("COLUMNS", "200")
    always = ("--data_root", str(waves), "--output", str(tmp_path / "sweep"))
    return lambda *words: cli.main(["sweep", str(recipe), *always, *words])


def validation_accuracy(run: Path) -> float:
    """By the files of the run itself: the mean over seeds of the chosen epoch's figure."""
    values = []
    for seed in (3, 4):
        chosen = json.loads((run / f"seed-{seed}" / "evaluation.json").read_text())["best_epoch"]
        rows = json.loads((run / f"seed-{seed}" / "metrics.json").read_text())
        values.append(next(row["val_accuracy"] for row in rows if row["epoch"] == chosen))
    return sum(values) / 2


@pytest.mark.usefixtures("brief")
def test_a_grid_is_complete_resumes_and_is_reported(sweep, tmp_path, waves, capsys, undrawn):
    folder = tmp_path / "sweep"
    assert sweep(*GRID, "--seeds", "3", "4") == 0
    points = open_sweep(folder).points()
    tried = [(point.keys["learning_rate"], json.dumps(point.keys["attention"])) for point in points]
    primal = '{"primal": {"rank": 2, "eta": 0.1}}'
    assert tried == [(0.001, '"softmax"'), (0.001, primal), (0.01, '"softmax"'), (0.01, primal)]
    assert endings(folder) == {0: 1, 1: 1, 2: 1, 3: 1}
    for point in points:
        assert point.value == pytest.approx(validation_accuracy(folder / "points" / f"{point.number:03d}"))
        assert len(point.values) == 2
    page = (folder / "report.html").read_text()
    assert page.count("<img") >= 4, "each key, the order of the points, the pair"
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "<script" not in page
    best = max(points, key=lambda point: point.value)
    assert f"{100 * best.value:.2f} " in page
    assert f"validation accuracy of point {best.number}:" in page

    trials = open_sweep(folder).study.trials
    assert sweep(*GRID, "--seeds", "3", "4") == 0, "the same command again finds nothing to do"
    assert cli.main(["sweep", "--resume", str(folder)]) == 0
    assert open_sweep(folder).study.trials == trials

    capsys.readouterr()
    assert sweep("--grid", "learning_rate=0.001,0.02", "--seeds", "3", "4") == 2
    assert "holds a sweep with another space; choose another folder with --output" in capsys.readouterr().err
    assert sweep(*GRID, "--seeds", "3", "4", "--epochs", "3") == 2
    assert "holds a sweep with another epochs" in capsys.readouterr().err
    assert sweep(*reversed_grid(), "--seeds", "3", "4") == 2
    assert "another space" in capsys.readouterr().err


def reversed_grid() -> tuple[str, ...]:
    return (*GRID[2:], *GRID[:2])


@pytest.mark.usefixtures("brief")
def test_a_point_that_cannot_be_built_fails_alone(sweep, tmp_path, capsys, undrawn):
    assert sweep("--grid", "embed_dim=8,9") == 1
    out, err = capsys.readouterr()
    assert "point 1: embed_dim=9 must be divisible by num_heads=2" in " ".join(err.split())
    assert "1 complete, 1 failed" in out
    folder = tmp_path / "sweep"
    assert (endings(folder), endings(folder, TrialState.FAIL)[1]) == ({0: 1, 1: 0}, 1)
    assert "must be divisible by num_heads=2" in (folder / "report.html").read_text()


@pytest.mark.usefixtures("brief")
def test_more_random_points_are_added_to_those_that_are_there(sweep, tmp_path, capsys, undrawn):
    words = ("--sampler", "random", "--range", "learning_rate=0.0001,0.1,log", "--epochs", "1")
    assert sweep(*words, "--points", "1") == 0
    first = open_sweep(tmp_path / "sweep").points()
    assert sweep(*words, "--points", "2") == 0
    points = open_sweep(tmp_path / "sweep").points()
    assert points[:1] == first
    assert endings(tmp_path / "sweep") == {0: 1, 1: 1}
    capsys.readouterr()
    assert sweep(*words, "--points", "1") == 2
    assert "holds a sweep of 2 points, and points=1 is less" in capsys.readouterr().err


@pytest.mark.slow
def test_two_worker_processes(sweep, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "brief_runs.py").write_text(BRIEF)
    words = ("--workers", "2", "--epochs", "1", "--plugin", "brief_runs")
    assert sweep("--grid", "learning_rate=0.001,0.01", *words) == 0
    folder = tmp_path / "sweep"
    assert endings(folder) == {0: 1, 1: 1}
    assert sorted(path.name for path in (folder / "points").iterdir()) == ["000", "001"]
    assert re.search(r"data:image/svg", (folder / "report.html").read_text())


@pytest.mark.usefixtures("brief")
def test_a_machine_without_the_data_touches_no_point(sweep, tmp_path, waves, capsys, undrawn):
    moved = shutil.copytree(waves, tmp_path / "data")
    recipe = str(tmp_path / "small.yaml")
    words = ["sweep", recipe, "--data_root", str(moved), "--output", str(tmp_path / "other")]
    assert cli.main([*words, "--grid", "epochs=1,2"]) == 0
    content = (tmp_path / "other" / "sweep.json").read_text()
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    (fresh / "sweep.json").write_text(content)
    shutil.rmtree(moved)
    capsys.readouterr()
    assert cli.main(["sweep", "--resume", str(fresh)]) == 2
    assert "Waves" in capsys.readouterr().err
    assert [point.state for point in open_sweep(fresh).points()] == ["waiting", "waiting"]
