"""Training without a run folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from kernel_attention.experiments.training.recorder import RunRecorder

if TYPE_CHECKING:
    from kernel_attention.experiments.training.fit import Training


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
