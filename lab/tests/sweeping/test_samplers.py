"""Random points and TPE are seeded, whatever process asks."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from sweeping.sweeps import small_sweep

from kernel_attention_lab.sweeping import SweepFolder, open_sweep

GRID = ["attention=[softmax, linear]"]
RANGES = ["learning_rate=0.0001,0.1,log", "embed_dim=4,32,4", "dropout=0,0.5"]


def figure(keys: dict) -> float:
    """A figure with its best at learning rate 0.01, linear attention."""
    return -abs(math.log10(keys["learning_rate"]) + 2) - (keys["attention"] == "softmax") + keys["dropout"]


def run_points(folder: Path, root: Path, seed: int, count: int, reopened: bool = False) -> list[dict]:
    """All keys of a TPE sweep whose points have the figure above; nothing is trained."""
    sweep = small_sweep(folder, root, GRID, RANGES, sampler="tpe", points=count, sampler_seed=seed)
    tried = []
    for number in range(count):
        assert sweep.begin(number)
        if reopened:  # as after a kill: once before the keys are chosen, once after
            sweep = open_sweep(folder)
            sweep.keys(number)
            sweep = open_sweep(folder)
        assert sweep.begin(number), "a point that had begun can be taken over"
        tried.append(sweep.keys(number))
        sweep.complete(number, [figure(tried[-1])])
        assert not sweep.begin(number)
    return tried


def test_random_points_depend_on_the_seed_alone(waves, tmp_path):
    def drawn(name: str, seed: int, count: int) -> list[dict]:
        options = {"sampler": "random", "points": count, "sampler_seed": seed}
        return [
            dict(point.keys)
            for point in small_sweep(tmp_path / name, waves, GRID, RANGES, **options).points()
        ]

    first = drawn("first", 0, 40)
    assert first == drawn("again", 0, 40)
    assert first[:3] == drawn("short", 0, 3)
    assert all(one != other for one, other in zip(first, drawn("other", 1, 40), strict=True))
    rates = [keys["learning_rate"] for keys in first]
    assert all(0.0001 <= rate <= 0.1 for rate in rates)
    # Uniform in the logarithm: each half of it has 20 of 40 points, and 5 deviations are 16.
    assert 4 <= sum(rate < 0.1**2.5 for rate in rates) <= 36
    assert {keys["embed_dim"] for keys in first} <= set(range(4, 33, 4))
    assert {keys["attention"] for keys in first} == {"softmax", "linear"}


def test_tpe_depends_on_the_seed_and_on_what_is_complete(waves, tmp_path):
    first = run_points(tmp_path / "first", waves, 0, 16)
    assert first == run_points(tmp_path / "killed", waves, 0, 16, reopened=True)
    other = run_points(tmp_path / "other", waves, 1, 16)
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_a_figure_is_recorded_once(waves, tmp_path):
    sweep = small_sweep(tmp_path / "sweep", waves, GRID)
    assert sweep.begin(0)
    sweep.complete(0, [1.0, 2.0])
    sweep.complete(0, [5.0])
    other = SweepFolder(tmp_path / "sweep")
    assert (other.points()[0].value, other.unfinished()) == (1.5, [1])
    other.fail(0, "too late")
    assert other.points()[0].state == "complete"


def test_a_line_that_a_dying_process_wrote_by_half_is_dropped(waves, tmp_path):
    folder = tmp_path / "sweep"
    small_sweep(folder, waves, GRID)
    with (folder / "study.journal").open("ab") as file:
        file.write(b'{"op_code":6,"worker_id":"x","trial')
    sweep = open_sweep(folder)
    assert sweep.begin(0)
    sweep.complete(0, [1.0])
    assert open_sweep(folder).points()[0].state == "complete"


def test_the_importance_of_a_key_that_decides_is_the_largest(waves, tmp_path):
    grid = ["learning_rate=0.001,0.01,0.1", "dropout=0.0,0.1,0.2"]
    sweep = small_sweep(tmp_path / "sweep", waves, grid)
    assert sweep.importances() is None
    for number in range(9):
        assert sweep.begin(number)
        keys = sweep.keys(number)
        sweep.complete(number, [math.log10(keys["learning_rate"]) + keys["dropout"]])
    shares = sweep.importances()
    assert list(shares) == ["learning_rate", "dropout"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["learning_rate"] > 0.9
