"""Records of imaginary models, whose figures are known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from runs.small_runs import brief, trained, waves  # noqa: F401

from kernel_attention_lab.evidence import ResultRecord
from kernel_attention_lab.packing import pack_bits


def attack_entry(attack: str, correct: np.ndarray, **changes: Any) -> dict[str, Any]:
    """An attack's entry of ``robustness.json``."""
    return {
        "attack": attack, "protocol": "pixel", "eps": 1 / 255, "cases": len(correct), "transferred": False,
        "options": {}, "accuracy": float(np.mean(correct)), "bits": pack_bits(correct), "seconds": 1.0,
    } | changes  # fmt: skip


def corruption_entry(correct: dict[str, np.ndarray]) -> dict[str, Any]:
    """The entry of the corruptions; (5, cases) answers by corruption."""
    accuracies = {name: answers.mean(axis=1).tolist() for name, answers in correct.items()}
    return {
        "cases": next(iter(correct.values())).shape[1],
        "accuracy": float(np.mean(list(accuracies.values()))),
        "accuracies": accuracies,
        "bits": {name: [pack_bits(row) for row in answers] for name, answers in correct.items()},
    }


@pytest.fixture
def make_record() -> Callable[..., ResultRecord]:
    """Makes a record with these figures of robustness."""

    def make(label: str, seed: int, **robustness: Any) -> ResultRecord:
        return ResultRecord(
            label=label,
            seed=seed,
            recipe="images/tiny",
            config={"attention": label, "dataset": "cifar10", "epochs": 10},
            budget={"epochs": 10, "seconds": 900.0, "threads": 1},
            software={"torch": "2.13.0"},
            machine="x86_64, 2 cores, 1 thread, no GPU",
            date="2026-11-22T05:00:00+00:00",
            revision="0123abc",
            figures={"evaluation": {"accuracy": 0.6}, "robustness": robustness},
        )

    return make
