"""Records of every round of a run: files, and the state from which it resumes exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.training.course import Course
from kernel_attention.training.recorder import Recorder
from kernel_attention.weights import write_weights
from kernel_attention_lab.run_folder import kept_weights_path
from kernel_attention_lab.training.files import write_csv, write_json
from kernel_attention_lab.training.recipe import BaseRecipe


class RunRecorder(Recorder):
    """Metrics, best and last weights, and the trainer's state: at step 0 and at every round's end.

    ``last.ckpt`` is written last and by rename, so it decides where a run resumes: files written after the
    previous checkpoint are written again, identically, by the resumed run. Of several processes, the first
    one writes.

    Ctrl-C and SIGTERM stop training after the current step, with a checkpoint of that step. After the last
    step of a round, the evaluation and the checkpoint of the round come first.

    Args:
        folder: the seed's folder.
        recipe: of the run.
        target_variance: as in ``Recorder``.
        quality: as in ``Recorder``.

    Attributes:
        on_row: called with every row that has been written, and the number of steps.
    """

    can_resume: ClassVar[bool] = True

    def __init__(
        self,
        folder: Path,
        recipe: BaseRecipe,
        target_variance: float | None = None,
        quality: str = "accuracy",
    ) -> None:
        super().__init__(target_variance, quality, getattr(recipe, "patience", 0))
        self.folder = folder
        self.recipe = recipe
        self.on_row: Callable[[dict[str, Any], int], object] | None = None
        self._partial: dict[str, Any] | None = None

    @property
    def checkpoint(self) -> Path:
        """The trainer's state."""
        return self.folder / "last.ckpt"

    def on_train_start(self, training: Course) -> None:
        """Write a checkpoint of step 0."""
        if training.step == 0:
            self._keep_weights(training, training.weights())
            self._save(training)
        self._end_early(training)

    def on_round_start(self, training: Course) -> None:
        super().on_round_start(training)
        if self._partial is not None:
            self._continue_round(self._partial)
            self._partial = None

    def on_stop(self, training: Course) -> None:
        """Write a checkpoint inside the round."""
        self._partial = self._state_within_round()
        self._save(training)

    def on_round_end(self, training: Course) -> None:
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
        if self.on_row is not None:
            self.on_row(row, training.step)
        training.bar.show(row)
        self._end_early(training)

    def restore(self, state: dict[str, Any]) -> None:
        require_recipe(self.recipe, state)
        found = state["recorder"]
        self.rows, self.best_epoch, self.best = found["rows"], found["best_epoch"], found["best"]
        self._partial = found["partial"]

    def _save(self, training: Course) -> None:
        state = {
            "rows": self.rows, "best_epoch": self.best_epoch, "best": self.best, "partial": self._partial
        }  # fmt: skip
        training.save(self.checkpoint, {"recipe": self.recipe.keys(), "recorder": state})

    def _keep_weights(self, training: Course, weights: dict[str, Tensor]) -> None:
        """Write the copy of this round where the recipe has one; 0 is before the first step."""
        every = self.recipe.keep_weights_every
        if every and training.round % every == 0 and training.processes.is_first:
            write_weights(kept_weights_path(self.folder, training.round), weights)

    def _state_within_round(self) -> dict[str, Any]:
        """The counts of the row of an unfinished round, in addition to the sums of its figures."""
        return {"seconds": time.perf_counter() - self._started}

    def _continue_round(self, partial: dict[str, Any]) -> None:
        """Go on from the counts of an unfinished round."""
        self._started -= partial["seconds"]

    def choice(self) -> dict[str, Any]:
        """The entries of ``evaluation.json`` about the round whose weights were chosen."""
        return {"best_epoch": self.best_epoch}


_CHANGEABLE = ("epochs", "seeds", "threads", "accelerator", "loggers")
"""Keys that may change when a run is resumed."""


def require_recipe(recipe: BaseRecipe, state: Mapping[str, Any]) -> None:
    """Refuse the checkpoint of another recipe: to continue it gives the result of neither recipe."""
    missing = [part for part in ("recipe", "recorder") if part not in state]
    if missing:
        raise InputError(f"checkpoint: not that of a run (it has no {', '.join(missing)})")
    current = recipe.keys()
    for key, value in state["recipe"].items():
        if key not in _CHANGEABLE and current.get(key) != value:
            raise InputError(
                f"the checkpoint was written with {key}={value!r}, the run's config.yaml says "
                f"{current.get(key)!r}: undo the change, or start a new run with it"
            )
