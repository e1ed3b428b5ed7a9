"""The figures of every round, and the round whose weights are best."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from kernel_attention.training.course import Course, Observer


class Recorder(Observer):
    """A row of figures for every round, and the best of them.

    Args:
        target_variance: variance of the evaluated targets, for R^2; None for classification.
        quality: the figure that chooses the round, the higher the better. Rows without it have the loss.
        patience: training ends after this many evaluations without a better one; 0 never ends it early.

    Attributes:
        rows: the figures of every round.
        best_epoch: the round whose weights are best; None where none was evaluated.
        best: what chose it.
    """

    def __init__(
        self, target_variance: float | None = None, quality: str = "accuracy", patience: int = 0
    ) -> None:
        self.target_variance = target_variance
        self.quality = quality
        self.patience = patience
        self.rows: list[dict[str, Any]] = []
        self.best_epoch: int | None = None
        self.best: tuple[float, float] | None = None
        self._started = 0.0

    def on_round_start(self, training: Course) -> None:
        """Begin the round's seconds."""
        self._started = time.perf_counter()

    def _end_early(self, training: Course) -> None:
        """End training where the patience is used up."""
        since = [row for row in self.rows if "val_loss" in row and row["epoch"] > (self.best_epoch or 0)]
        if self.patience and len(since) >= self.patience:
            training.should_stop = True

    def _row(self, training: Course) -> dict[str, Any]:
        row: dict[str, Any] = {"epoch": training.round}
        for name, value in training.figures().items():
            stage, _, metric = name.partition("_")
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} in epoch {training.round}")
            if metric == "mse":
                row[f"{stage}_rmse"] = math.sqrt(value)
                if stage == "val" and self.target_variance:
                    row["val_r2"] = 1.0 - value / self.target_variance
            else:
                row[name] = value
        row["seconds"] = round(time.perf_counter() - self._started, 3)
        return row

    def _improves(self, row: dict[str, Any]) -> bool:
        """Higher quality or lower error; the lower loss among equals. False without an evaluation."""
        if "val_loss" not in row:
            return False
        quality = (row.get(f"val_{self.quality}", -row["val_loss"]), -row["val_loss"])
        if self.best is not None and quality <= tuple(self.best):
            return False
        self.best, self.best_epoch = quality, row["epoch"]
        return True


class MemoryRecorder(Recorder):
    """The figures of a run and its best epoch, kept in memory.

    Args:
        target_variance: as in ``Recorder``.
        patience: as in ``Recorder``.
        watch: called after every epoch with the figures of all epochs so far; True ends training.

    Attributes:
        weights: state dict of the model in its best epoch; None where no epoch was evaluated.
    """

    def __init__(
        self,
        target_variance: float | None = None,
        patience: int = 0,
        watch: Callable[[list[dict[str, Any]]], bool] | None = None,
    ) -> None:
        super().__init__(target_variance, patience=patience)
        self.watch = watch
        self.weights: dict[str, Tensor] | None = None

    def on_round_end(self, training: Course) -> None:
        """Record the figures; keep the weights if they are the best so far."""
        row = self._row(training)
        self.rows.append(row)
        if self._improves(row):
            self.weights = copy.deepcopy(training.weights())
        training.bar.show(row)
        self._end_early(training)
        if self.watch is not None and self.watch(self.rows):
            training.should_stop = True
