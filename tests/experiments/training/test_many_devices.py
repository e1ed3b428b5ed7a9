"""Several processes train what one would train with their batches together, and each task's run goes on.

Dropout is 0: the processes have random numbers of their own. A figure of a run is a mean in float32 of terms
that are added up in another order, some hundred roundings of 6e-8 each; the optimizers pass on what differs.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from experiments.training.decision_data import DECISIONS, make_decisions
from experiments.training.image_data import IMAGES, make_images
from experiments.training.runs import (
    MEASURED,
    SMALL,
    launch,
    make_waves,
    read_json,
    train_arguments,
    trained_run,
)
from experiments.training.text_data import LANGUAGE, make_text
from experiments.training.token_data import TOKENS, make_tokens

from kernel_attention.experiments.training.files import read_weights

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed")

ROUNDING = 1e-5
POSITIONS: dict[str, Any] = {
    "task": "sequence_labels", "dataset": "majority", "attention": {"primal": {"rank": 3, "eta": 0.1}},
    "embed_dim": 8, "num_heads": 2, "num_layers": 1, "feedforward_dim": 16, "steps": 6, "evaluate_every": 3,
    "batch_size": 7, "evaluation_cases": 9, "length": 12, "accelerator": "cpu", "threads": 1,
}  # fmt: skip
PRIMAL = {"attention": {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}}}
PLAIN = {"augmentation": "none", "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}
TASKS = {
    "time series": (SMALL, make_waves),
    "regression": (
        SMALL | {"dataset": "Tides"}, lambda root: make_waves(root, "Tides", regression=True)
    ),
    "images": (IMAGES | PRIMAL | PLAIN, make_images),
    "language": (LANGUAGE, make_text),
    "tokens": (TOKENS | {"dataset": "sst2"}, make_tokens),
    "decisions": (DECISIONS, make_decisions),
}  # fmt: skip


def several(folder: Path, keys: dict[str, Any], root: Path, *options: str, seconds: float = 240) -> str:
    """Train in a process of its own, which starts the others; what it says on standard error."""
    process = launch(*train_arguments(folder, keys, root), *options)
    try:
        said = process.communicate(timeout=seconds)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def rows(folder: Path) -> list[dict[str, float]]:
    """The figures of every round that are not durations."""
    with (folder / "seed-0/metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if name not in MEASURED and value}
            for row in csv.DictReader(file)
        ]


def assert_alike(found: Path, expected: Path, rounding: float = ROUNDING) -> None:
    """The same figures and weights up to rounding."""
    for row, wanted in zip(rows(found), rows(expected), strict=True):
        assert row == pytest.approx(wanted, rel=rounding, abs=rounding)
    weights, wanted = (read_weights(folder / "seed-0/last.safetensors") for folder in (found, expected))
    for name, value in wanted.items():
        torch.testing.assert_close(weights[name], value, rtol=10 * rounding, atol=10 * rounding)


def halved(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"dropout": 0.0, "batch_size": keys["batch_size"]}


def doubled(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"dropout": 0.0, "batch_size": 2 * keys["batch_size"]}


def test_two_processes_train_as_one_with_twice_the_batch(tmp_path):
    """The last batch of an epoch has 5 of 14 cases, so the processes have unequal numbers of them."""
    root = make_waves(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(SMALL), root)
    said = several(tmp_path / "two", halved(SMALL), root, "--devices", "2")
    assert "note: a step has 14 sequences (7 in a batch x 2 processes, ddp)" in said
    assert_alike(tmp_path / "two", one)
    assert (tmp_path / "two/report.html").is_file()
    summary = read_json(tmp_path / "two/summary.json")
    assert (summary["processes"], summary["effective_batch"]) == (2, 14)


@pytest.mark.parametrize("keys", [{}, {"optimizer": "adamw", "gradient_clip": 0.1}], ids=["radam", "clipped"])
def test_two_passes_train_as_one_with_twice_the_batch(keys, tmp_path):
    """Without J, whose square is taken in every pass."""
    plain = SMALL | {"attention": {"primal": {"rank": 3, "rank_multiplier": 2}}} | keys
    root = make_waves(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(plain), root)
    assert_alike(trained_run(tmp_path / "two", halved(plain), root, "--accumulate", "2"), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_as_one_process_does(name, tmp_path):
    keys, make = TASKS[name]
    (tmp_path / "data").mkdir()
    root = make(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(keys), root)
    several(tmp_path / "two", halved(keys), root, "--devices", "2")
    assert_alike(tmp_path / "two", one)
