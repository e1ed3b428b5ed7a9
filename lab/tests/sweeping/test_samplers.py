"""Random points and TPE are seeded, whatever process asks."""

from __future__ import annotations

import math
import time
import warnings
from pathlib import Path

import pytest
from optuna.trial import TrialState
from sweeping.sweeps import run_all, run_in_memory, small_sweep

from kernel_attention.errors import InputError
from kernel_attention_lab.sweeping import open_sweep, study, workers

GRID = ["attention=[softmax, linear]"]
RANGES = ["learning_rate=0.0001,0.1,log", "embed_dim=4,32,4", "dropout=0,0.5"]


def figure(keys: dict) -> float:
    """A figure with its best at learning rate 0.01, linear attention."""
    return -abs(math.log10(keys["learning_rate"]) + 2) - (keys["attention"] == "softmax") + keys["dropout"]


def run_points(folder: Path, root: Path, seed: int, count: int, killed: bool = False) -> list[dict]:
    """All keys of a TPE sweep whose points have the figure above; nothing is trained."""
    sweep = small_sweep(folder, root, GRID, RANGES, sampler="tpe", points=count, sampler_seed=seed)
    if not killed:
        return run_in_memory(sweep, figure)
    tried = run_all(sweep, figure, 10)  # drawn at random, as TPE begins
    sweep = open_sweep(folder)
    for _ in range(count - 10):  # these are begun, and killed before their keys are chosen, and after
        for choose in (lambda trial: None, sweep.choose):

            def interrupted(trial, choose=choose):
                choose(trial)
                raise KeyboardInterrupt

            assert sweep.offer()
            with pytest.raises(KeyboardInterrupt):
                sweep.study.optimize(interrupted, n_trials=1)
            sweep = open_sweep(folder)
        tried += run_all(sweep, figure, 1)
    return tried


def test_random_points_depend_on_the_seed_alone(waves, tmp_path):
    def drawn(name: str, seed: int, count: int) -> list[dict]:
        options = {"sampler": "random", "points": count, "sampler_seed": seed}
        sweep = small_sweep(tmp_path / name, waves, GRID, RANGES, **options)
        return run_in_memory(sweep, figure)

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
    first = run_points(tmp_path / "first", waves, 0, 13)
    assert first == run_points(tmp_path / "killed", waves, 0, 13, killed=True)
    other = run_points(tmp_path / "other", waves, 1, 13)
    assert all(one != another for one, another in zip(first, other, strict=True))


def test_a_worker_that_was_taken_for_dead_records_nothing(waves, tmp_path, monkeypatch):
    """It stood still for long, and another worker failed its trial. The point is run again."""
    sweep = small_sweep(tmp_path / "sweep", waves, ["learning_rate=0.1"])
    found = iter([9.0, 1.0])

    def train(*_):
        value = next(found)
        if value == 9.0:
            (running,) = sweep.study.get_trials(states=[TrialState.RUNNING])
            sweep.study.tell(running.number, state=TrialState.FAIL)
        return [value]

    monkeypatch.setattr(workers, "_train", train)
    workers.work(sweep)
    assert [(point.state, point.value) for point in open_sweep(sweep.folder).points()] == [("complete", 1.0)]


@pytest.mark.parametrize("error", [InputError("no"), ValueError("no")])
def test_a_point_that_fails_is_not_run_again(waves, tmp_path, monkeypatch, error):
    sweep = small_sweep(tmp_path / "sweep", waves, ["learning_rate=0.1,0.2"])

    def train(sweep, keys, *_):
        if keys["learning_rate"] == 0.1:
            raise error
        return [1.0]

    monkeypatch.setattr(workers, "_train", train)
    workers.work(sweep)
    assert [point.state for point in sweep.points()] == ["failed", "complete"]
    assert len(sweep.study.trials) == 2


def test_a_silent_workers_point_is_free(waves, tmp_path, monkeypatch):
    monkeypatch.setattr(study, "BEAT", 1)
    monkeypatch.setattr(study, "GRACE", 1)
    sweep, other = (small_sweep(tmp_path / "sweep", waves, ["learning_rate=0.1"]) for _ in range(2))
    assert sweep.offer()
    offers = []

    def objective(trial):
        time.sleep(3)
        offers.append(other.offer())
        return 1.0

    sweep.study.optimize(objective, n_trials=1)
    assert offers == [False], "a worker whose heart beats keeps its point"

    sweep, other = (small_sweep(tmp_path / "other", waves, ["learning_rate=0.1"]) for _ in range(2))
    assert sweep.offer()
    with warnings.catch_warnings(action="ignore"):
        sweep.study.ask()  # and die before the first beat
    assert not other.offer()
    time.sleep(3)
    assert other.offer()


def test_a_damaged_study_is_one_line(waves, tmp_path):
    folder = tmp_path / "sweep"
    small_sweep(folder, waves, GRID)
    (folder / "study.db").write_bytes(b"no database" * 1000)
    with pytest.raises(InputError, match=r"sweep .*study\.db: file is not a database"):
        open_sweep(folder)


def test_a_sweep_of_an_earlier_version_is_refused(waves, tmp_path):
    folder = tmp_path / "sweep"
    small_sweep(folder, waves, GRID)
    text = (folder / "sweep.json").read_text()
    (folder / "sweep.json").write_text(text.replace('"schema": 2', '"schema": 1'))
    with pytest.raises(InputError, match=r"sweep\.json: a sweep of schema 1 and not 2, which another"):
        open_sweep(folder)


def test_the_importance_of_a_key_that_decides_is_the_largest(waves, tmp_path):
    grid = ["learning_rate=0.001,0.01,0.1", "dropout=0.0,0.1,0.2"]
    sweep = small_sweep(tmp_path / "sweep", waves, grid)
    assert sweep.importances() is None
    run_in_memory(sweep, lambda keys: math.log10(keys["learning_rate"]) + keys["dropout"])
    shares = sweep.importances()
    assert list(shares) == ["learning_rate", "dropout"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["learning_rate"] > 0.9
