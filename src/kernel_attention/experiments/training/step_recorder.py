"""The records of a run counted in steps: figures, speed and memory."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import lightning as L
import torch

from kernel_attention.experiments.peak_memory import peak_resident
from kernel_attention.experiments.training.recipe import StepRecipe
from kernel_attention.experiments.training.recorder import RunRecorder


class StepRecorder(RunRecorder):
    """A row every ``evaluate_every`` steps, with ``step``, ``tokens_per_second`` and ``peak_rss_mb``.

    ``epoch`` counts the rows. The speed is that of the training steps of the row, without the evaluation; the
    memory is the process's largest resident set so far, left out where the system does not tell it, and on a
    GPU ``peak_gpu_mb`` is the largest allocation.

    Args:
        folder: the seed's folder.
        recipe: gives the number of steps per row.
    """

    def __init__(self, folder: Path, recipe: StepRecipe) -> None:
        super().__init__(folder)
        self.steps_per_round = recipe.steps_per_round
        self._tokens = 0
        self._training_seconds = 0.0
        self._batch_started = 0.0

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_epoch_start(trainer, pl_module)
        self._tokens, self._training_seconds = 0, 0.0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if self._partial is not None:
            self._tokens = self._partial["tokens"]
            self._training_seconds = self._partial["training_seconds"]

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        self._batch_started = time.perf_counter()

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count the real tokens, without padding."""
        self._training_seconds += time.perf_counter() - self._batch_started
        self._tokens += count_tokens(batch)
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)

    def choice(self) -> dict[str, Any]:
        chosen = super().choice()
        return chosen | {"best_step": (self.best_epoch or 0) * self.steps_per_round}

    def _state_within_epoch(self) -> dict[str, Any]:
        counts = {"tokens": self._tokens, "training_seconds": self._training_seconds}
        return super()._state_within_epoch() | counts

    def _row(self, trainer: L.Trainer) -> dict[str, Any]:
        row = super()._row(trainer)
        measured = {
            "step": row["epoch"] * self.steps_per_round,
            "tokens_per_second": round(self._tokens / max(self._training_seconds, 1e-9), 1),
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
