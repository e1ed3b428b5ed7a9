"""What a run keeps of every round: files, and the state from which it resumes exactly; or figures alone."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kernel_attention_lab.run_folder import kept_weights_path
from kernel_attention_lab.training.files import write_csv, write_json, write_weights
from kernel_attention_lab.training.observer import Observer

if TYPE_CHECKING:
    from kernel_attention_lab.training.fit import Training


class RunRecorder(Observer):
    """Metrics, best and last weights, and the trainer's state: at step 0 and at every round's end.

    ``last.ckpt`` is written last and by rename, so it decides where a run resumes: files written after the
    previous checkpoint are written again, identically, by the resumed run. Of several processes, the first
    one writes.

    Ctrl-C and SIGTERM stop training after the current step, with a checkpoint of that step. After the last
    step of a round, the evaluation and the checkpoint of the round come first.

    Args:
        folder: the seed's folder.
        target_variance: variance of the evaluated targets, for R^2; None for classification.
        quality: the figure that chooses the round, the higher the better. Rows without it have the loss.

    Attributes:
        told: called with every row that has been written, and the number of steps.
    """

    can_resume: ClassVar[bool] = True

    def __init__(self, folder: Path, target_variance: float | None = None, quality: str = "accuracy") -> None:
        self.folder = folder
        self.target_variance = target_variance
        self.quality = quality
        self.rows: list[dict[str, Any]] = []
        self.best_epoch: int | None = None
        self.best: tuple[float, float] | None = None
        self.told: Callable[[dict[str, Any], int], object] | None = None
        self._partial: dict[str, Any] | None = None
        self._started = 0.0

    @property
    def checkpoint(self) -> Path:
        """The trainer's state."""
        return self.folder / "last.ckpt"

    def on_train_start(self, training: Training) -> None:
        """Write a checkpoint of step 0."""
        if training.step == 0:
            self._keep_weights(training, training.weights())
            self._save(training)
        self._end_early(training)

    def on_round_start(self, training: Training) -> None:
        self._started = time.perf_counter()
        if self._partial is not None:
            self._continue_round(self._partial)
            self._partial = None

    def on_stop(self, training: Training) -> None:
        """Write a checkpoint inside the round."""
        self._partial = self._state_within_round()
        self._save(training)

    def on_round_end(self, training: Training) -> None:
        """Write all files, the checkpoint last."""
        row = self._row(training)
        self.rows.append(row)
        weights, is_better = training.weights(), self._improves(row)
        if training.processes.is_first:
            if is_better:
                write_weights(self.folder / "best.safetensors", weights)
            write_weights(self.folder / "last.safetensors", weights)
            write_json(self.folder / "metrics.json", self.rows)
            write_csv(self.folder / "metrics.csv", self.rows)
        self._keep_weights(training, weights)
        self._save(training)
        if self.told is not None:
            self.told(row, training.step)
        training.bar.show(row)
        self._end_early(training)

    def restore(self, state: dict[str, Any]) -> None:
        found = state["recorder"]
        self.rows, self.best_epoch, self.best = found["rows"], found["best_epoch"], found["best"]
        self._partial = found["partial"]

    def _save(self, training: Training) -> None:
        state = {
            "rows": self.rows, "best_epoch": self.best_epoch, "best": self.best, "partial": self._partial
        }  # fmt: skip
        training.save(self.checkpoint, {"recorder": state})

    def _keep_weights(self, training: Training, weights: dict[str, Tensor]) -> None:
        """Write the copy of this round where the recipe has one; 0 is before the first step."""
        every = training.recipe.keep_weights_every
        if every and training.round % every == 0 and training.processes.is_first:
            write_weights(kept_weights_path(self.folder, training.round), weights)

    def _end_early(self, training: Training) -> None:
        """End training where the recipe has a patience that is used up."""
        patience = getattr(training.recipe, "patience", 0)
        since = [row for row in self.rows if "val_loss" in row and row["epoch"] > (self.best_epoch or 0)]
        if patience and len(since) >= patience:
            training.should_stop = True

    def _state_within_round(self) -> dict[str, Any]:
        """The counts of the row of an unfinished round, in addition to the sums of its figures."""
        return {"seconds": time.perf_counter() - self._started}

    def _continue_round(self, partial: dict[str, Any]) -> None:
        """Go on from the counts of an unfinished round."""
        self._started -= partial["seconds"]

    def choice(self) -> dict[str, Any]:
        """The entries of ``evaluation.json`` about the round whose weights were chosen."""
        return {"best_epoch": self.best_epoch}

    def _row(self, training: Training) -> dict[str, Any]:
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


class MemoryRecorder(RunRecorder):
    """The figures of a run and its best epoch, kept in memory.

    Args:
        target_variance: as in ``RunRecorder``.
        watch: called after every epoch with the figures of all epochs so far; True ends training.

    Attributes:
        rows: the figures of every epoch.
        weights: state dict of the model in its best epoch; None where no epoch was evaluated.
    """

    can_resume: ClassVar[bool] = False

    def __init__(
        self,
        target_variance: float | None = None,
        watch: Callable[[list[dict[str, Any]]], bool] | None = None,
    ) -> None:
        super().__init__(Path(), target_variance)
        self.watch = watch
        self.weights: dict[str, Tensor] | None = None

    def on_train_start(self, training: Training) -> None:
        """Nothing to write."""

    def on_round_end(self, training: Training) -> None:
        """Record the figures; keep the weights if they are the best so far."""
        row = self._row(training)
        self.rows.append(row)
        if self._improves(row):
            self.weights = copy.deepcopy(training.weights())
        training.bar.show(row)
        self._end_early(training)
        if self.watch is not None and self.watch(self.rows):
            training.should_stop = True
