"""Records of every round of a run: files, and the state from which it resumes exactly."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.training.course import Course, Recorder
from kernel_attention.weights import write_weights
from kernel_attention_lab.peak_memory import peak_resident
from kernel_attention_lab.run_folder import kept_weights_path
from kernel_attention_lab.runs.files import write_csv, write_json
from kernel_attention_lab.tasks.experiment import Experiment
from kernel_attention_lab.tasks.recipe import BaseRecipe, StepRecipe


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
        keeps_last: whether every row is taken for the best, so that the last weights are.

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
        *,
        keeps_last: bool = False,
    ) -> None:
        super().__init__(target_variance, quality, getattr(recipe, "patience", 0))
        self.folder = folder
        self.recipe = recipe
        self.keeps_last = keeps_last
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

    def _improves(self, row: dict[str, Any]) -> bool:
        if not self.keeps_last:
            return super()._improves(row)
        self.best_epoch = row["epoch"]
        return True

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

    recipe: StepRecipe

    def __init__(self, folder: Path, recipe: StepRecipe, *arguments: Any, **options: Any) -> None:
        super().__init__(folder, recipe, *arguments, **options)
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


def make_recorder(experiment: Experiment, folder: Path, seed: int) -> RunRecorder:
    """The recorder of a seed's training."""
    recipe, metric = experiment.recipe, experiment.metric
    quality = metric.name if metric.larger_is_better else "accuracy"
    arguments, keeps_last = (experiment.target_variance(seed), quality), experiment.keeps_last_weights
    if isinstance(recipe, StepRecipe):
        return StepRecorder(folder, recipe, *arguments, keeps_last=keeps_last)
    return RunRecorder(folder, recipe, *arguments, keeps_last=keeps_last)
