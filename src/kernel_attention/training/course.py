"""The course of a training: what its task and its observers see of it, its progress bar and its figures."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol

from torch import Tensor

from kernel_attention.core.sequence_group import SequenceGroup
from kernel_attention.training.processes import Processes
from kernel_attention.training.settings import TrainSettings

_SHOWN = ("train_loss", "val_loss", "val_accuracy", "val_rmse", "val_mean_iou")


class ProgressBar:
    """The steps of the round, and the figures of the round before.

    Args:
        shown: whether there is one.
    """

    def __init__(self, shown: bool) -> None:
        self._bar: Any = None
        self._row: Any = None
        self._figures = ""
        if shown:
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
            )  # fmt: skip

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def start_round(self, number: int, rounds: int, steps: int, done: int) -> None:
        """Begin a round of so many steps, some of which may be done."""
        if self._bar is None:
            return
        said = f"round {number + 1}/{rounds}"
        if self._row is None:
            self._row = self._bar.add_task(said, total=steps, completed=done, figures="")
        else:
            self._bar.reset(self._row, description=said, total=steps, completed=done, figures=self._figures)

    def advance(self) -> None:
        """One step is done."""
        if self._bar is not None:
            self._bar.advance(self._row)

    def show(self, row: dict[str, Any]) -> None:
        """The figures to be shown from now on."""
        self._figures = "  ".join(f"{name} {row[name]:.4g}" for name in _SHOWN if name in row)
        if self._bar is not None and self._row is not None:
            self._bar.update(self._row, figures=self._figures)


class Course(Protocol):
    """A training that is going on.

    Attributes:
        settings: of the loop.
        processes: that train together.
        bar: the progress bar.
        round: rounds done.
        step: steps done.
        steps_in_round: of these, since the last whole round.
        steps_per_round: steps of a round.
        total_steps: steps of all rounds.
        replicas: the group of processes with other sequences, over which J is averaged; None for none.
        should_stop: set by a task or an observer to end training.
    """

    settings: TrainSettings
    processes: Processes
    bar: ProgressBar
    round: int
    step: int
    steps_in_round: int
    steps_per_round: int
    total_steps: int
    replicas: SequenceGroup | None
    should_stop: bool

    def counted(self, cases: int) -> int:
        """The cases of the batch at hand, or 0 where it only keeps this process in step with the others."""
        ...

    def figures(self) -> dict[str, float]:
        """The means of what the tasks of all processes have logged in this round."""
        ...

    def weights(self) -> dict[str, Tensor]:
        """The evaluated weights under the model's own names. All processes must call it."""
        ...

    def save(self, path: Path, more: dict[str, Any]) -> None:
        """Write a checkpoint with ``more`` in it. All processes must call it; the first one writes."""
        ...


class Observer:
    """A watcher of a training. Nothing here does anything; a subclass does.

    Every process has observers of its own.
    """

    can_resume: ClassVar[bool] = False
    """True where it writes checkpoints, so that a signal may stop training after a step."""

    def on_train_start(self, training: Course) -> None:
        """Before the first step, or before the first after a checkpoint."""

    def on_round_start(self, training: Course) -> None:
        """Before the first step of a round, or before the first after a checkpoint."""

    def on_step_start(self, training: Course) -> None:
        """Before a step; its batches have been read."""

    def on_step_end(self, training: Course, batches: list[Any]) -> None:
        """After a step, with the batches that this process has read for it."""

    def on_round_end(self, training: Course) -> None:
        """After a round and its evaluation; ``training.round`` counts it."""

    def on_stop(self, training: Course) -> None:
        """After a step inside a round, when a signal ends training there."""

    def restore(self, state: dict[str, Any]) -> None:
        """Read its part of a checkpoint, before anything else does.

        Raises:
            InputError: for the checkpoint of another run.
        """


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
