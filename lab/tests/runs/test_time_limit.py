"""Training for a time instead of a number of steps, and the course that its record keeps."""

from __future__ import annotations

import json

import pytest
import yaml
from runs.small_runs import stopped_at

from kernel_attention.errors import InputError
from kernel_attention_lab.cli import main
from kernel_attention_lab.evidence import make_records, read_record, write_records
from kernel_attention_lab.runs.recorder import CLOCKS
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.sequence_labels import PositionLearning

pytestmark = pytest.mark.usefixtures("brief")

PARITY = {
    "task": "sequence_labels",
    "dataset": "parity",
    "options": {"length": 4},
    "attention": "softmax",
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "feedforward_dim": 8,
    "batch_size": 4,
    "steps": 20,
    "evaluate_every": 2,
    "evaluation_cases": 6,
    "schedule": "constant",
    "accelerator": "cpu",
    "threads": 1,
}
STEP = 1.0  # seconds of a step of the clock below


def trained(folder, expected=0, **changes):
    recipe = folder.with_name(f"{folder.name}.yaml")
    recipe.write_text(yaml.safe_dump(PARITY | changes, sort_keys=False))
    arguments = ["train", str(recipe), "--output", str(folder), "--progress", "false"]
    assert main(arguments) == expected
    return folder


def rows(folder):
    return json.loads((folder / "seed-0/metrics.json").read_text())


@pytest.fixture(params=["wall", "processor"])
def clock(request, monkeypatch):
    """A clock of this kind that goes on by a second at every training step; the other stands still."""
    now = [100.0]
    original = PositionLearning.training_step

    def step(self, batch):
        now[0] += STEP
        return original(self, batch)

    monkeypatch.setattr(PositionLearning, "training_step", step)
    for name in ("wall", "processor"):
        monkeypatch.setitem(CLOCKS, name, lambda counts=name == request.param: now[0] if counts else 0.0)
    return request.param


def test_training_ends_with_the_evaluation_after_the_limit(clock, tmp_path):
    """Steps of one second, an evaluation every two: five seconds are over at the third."""
    folder = trained(tmp_path / "run", max_seconds=5.0, clock=clock)
    assert [(row["step"], row["training_seconds"]) for row in rows(folder)] == [(2, 2.0), (4, 4.0), (6, 6.0)]
    evaluation = json.loads((folder / "seed-0/evaluation.json").read_text())
    assert evaluation["best_step"] in (2, 4, 6)


def test_the_steps_of_the_recipe_end_training_too(clock, tmp_path):
    folder = trained(tmp_path / "run", max_seconds=50.0, clock=clock, steps=4)
    assert [row["step"] for row in rows(folder)] == [2, 4]


@pytest.mark.parametrize("at", [1, 3, 6])
def test_a_stopped_run_goes_on_for_the_time_that_is_left(at, clock, tmp_path):
    """Also where it is stopped at the last step, when the time is over but nothing is tested yet."""
    with stopped_at(PositionLearning, at):
        folder = trained(tmp_path / "run", expected=1, max_seconds=5.0, clock=clock)
    assert main(["train", "--resume", str(folder), "--progress", "false"]) == 0
    assert [(row["step"], row["training_seconds"]) for row in rows(folder)] == [(2, 2.0), (4, 4.0), (6, 6.0)]


def test_the_record_keeps_the_course(clock, tmp_path):
    folder = trained(tmp_path / "run", max_seconds=3.0, clock=clock)
    (made,) = make_records(folder, label="softmax")
    course = made.figures["course"]
    assert course["step"] == [2, 4]
    assert course["training_seconds"] == [2.0, 4.0]
    for name in ("val_accuracy", "train_accuracy", "train_loss"):
        assert course[name] == [row[name] for row in rows(folder)]
    (path,) = write_records([made], tmp_path / "results")
    assert read_record(path) == made


def test_a_schedule_without_a_known_end_is_refused():
    with pytest.raises(InputError, match=r"max_seconds=60 with schedule='linear'.*constant, inverse_sqrt"):
        make_recipe(PARITY | {"max_seconds": 60, "schedule": "linear"})
    assert make_recipe(PARITY | {"max_seconds": 60}).duration == "60 s (wall time), at most 20 steps"
    assert make_recipe(PARITY).duration == "20 steps"
