"""The records of a run counted in steps: figures, speed and memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from kernel_attention.training.course import Course
from kernel_attention_lab.peak_memory import peak_resident
from kernel_attention_lab.training.recipe import StepRecipe
from kernel_attention_lab.training.recorder import RunRecorder

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds by the name of the clock."""


class StepRecorder(RunRecorder):
    """A row every ``evaluate_every`` steps, with ``step``, ``training_seconds``, speed and ``peak_rss_mb``.

    ``epoch`` counts the rows. ``training_seconds`` is what all training steps so far have taken by the
    recipe's clock, without the evaluations; training ends with the row that reaches the recipe's limit.
    ``tokens_per_second`` is the speed of the row's training steps by the wall clock; the memory is the
    process's largest resident set so far, left out where the system does not tell it, and on a GPU
    ``peak_gpu_mb`` is the largest allocation.

    Args:
        folder: the seed's folder.
        recipe: gives the number of steps per row, the clock and its limit.
    """

    def __init__(self, folder: Path, recipe: StepRecipe) -> None:
        super().__init__(folder, recipe)
        self.steps_per_round = recipe.steps_per_round
        self.max_seconds = recipe.max_seconds
        self._clock = CLOCKS[recipe.clock]
        self._tokens = 0
        self._row_seconds = 0.0  # by the wall clock
        self._training_seconds = 0.0  # of all rows, by the recipe's clock
        self._step_started = (0.0, 0.0)

    def on_round_start(self, training: Course) -> None:
        self._tokens, self._row_seconds = 0, 0.0
        super().on_round_start(training)

    def on_train_start(self, training: Course) -> None:
        super().on_train_start(training)
        # Runs of earlier versions count from where they resume.
        self._training_seconds = self.rows[-1].get("training_seconds", 0.0) if self.rows else 0.0
        if self._partial is None and self._is_over():  # stopped between its last row and its test figures
            training.should_stop = True

    def on_step_start(self, training: Course) -> None:
        self._step_started = time.perf_counter(), self._clock()

    def on_step_end(self, training: Course, batches: list[Any]) -> None:
        """Count the time, and the real tokens, without padding."""
        if torch.accelerator.is_available() and training.steps_in_round == training.steps_per_round:
            torch.accelerator.synchronize()  # the steps are only launched; the last one waits for them all
        started, counted = self._step_started
        self._row_seconds += time.perf_counter() - started
        self._training_seconds += self._clock() - counted
        self._tokens += sum(count_tokens(batch) for batch in batches)

    def on_round_end(self, training: Course) -> None:
        """Also end training where the recipe's seconds are over."""
        super().on_round_end(training)
        if self._is_over():
            training.should_stop = True

    def choice(self) -> dict[str, Any]:
        chosen = super().choice()
        return chosen | {"best_step": (self.best_epoch or 0) * self.steps_per_round}

    def _state_within_round(self) -> dict[str, Any]:
        return super()._state_within_round() | {
            "tokens": self._tokens,
            "row_seconds": self._row_seconds,
            "training_seconds": self._training_seconds,
        }

    def _continue_round(self, partial: dict[str, Any]) -> None:
        super()._continue_round(partial)
        self._tokens, self._row_seconds = partial["tokens"], partial["row_seconds"]
        self._training_seconds = partial["training_seconds"]

    def _is_over(self) -> bool:
        return 0 < self.max_seconds <= self._training_seconds

    def _row(self, training: Course) -> dict[str, Any]:
        row = super()._row(training)
        tokens = training.processes.total([float(self._tokens)])[0] / training.settings.sequence_shards
        measured = {
            "step": row["epoch"] * self.steps_per_round,
            "training_seconds": round(self._training_seconds, 3),
            "tokens_per_second": round(tokens / max(self._row_seconds, 1e-9), 1),
        }
        peak = peak_resident()
        if peak is not None:
            measured["peak_rss_mb"] = round(peak / 2**20, 1)
        if torch.cuda.is_available():
            measured["peak_gpu_mb"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
        return {"epoch": row.pop("epoch"), "step": measured.pop("step")} | row | measured


def count_tokens(batch: Any) -> int:
    """The real tokens of a batch with an ``attention_mask``, else the elements of its first tensor."""
    mask = getattr(batch, "attention_mask", None)
    return int(batch[0].numel() if mask is None else mask.sum())
