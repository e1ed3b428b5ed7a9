"""The time that the records of a run counted in steps tell."""

from __future__ import annotations

import time
from types import SimpleNamespace

import torch

from kernel_attention_lab.runs.recorder import StepRecorder
from kernel_attention_lab.tasks.sequence_labels import PositionRecipe


def test_a_round_waits_for_the_gpu_once(tmp_path, monkeypatch):
    """The calls of a step return before a GPU has done its work; the round's time has all of it."""
    waits = []

    def synchronize() -> None:
        time.sleep(0.05)
        waits.append(training.steps_in_round)

    recipe = PositionRecipe(dataset="mqar", steps=6, evaluate_every=3)
    recorder = StepRecorder(tmp_path, recipe)
    training = SimpleNamespace(steps_per_round=3, steps_in_round=0)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", synchronize)
    for step in range(1, 7):
        recorder.on_step_start(training)
        training.steps_in_round = (step - 1) % 3 + 1
        recorder.on_step_end(training, [])
    assert waits == [3, 3]
    assert recorder._training_seconds >= 0.1
