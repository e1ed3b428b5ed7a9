"""Training without a run folder."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor

from kernel_attention.experiments.training.recorder import RunRecorder


class MemoryRecorder(RunRecorder):
    """The figures of a run and its best epoch, kept in memory.

    Args:
        target_variance: as in ``RunRecorder``.
        watch: called after every epoch with the figures of all epochs so far; True ends training.

    Attributes:
        rows: the figures of every epoch.
        weights: state dict of the model in its best epoch; None where no epoch was evaluated.
    """

    def __init__(
        self,
        target_variance: float | None = None,
        watch: Callable[[list[dict[str, Any]]], bool] | None = None,
    ) -> None:
        super().__init__(Path(), target_variance)
        self.watch = watch
        self.weights: dict[str, Tensor] | None = None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Nothing to write."""

    def on_train_batch_end(self, *_: Any) -> None:
        """Nothing to resume."""

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Record the figures; keep the weights if they are the best so far."""
        row = self._row(trainer)
        self.rows.append(row)
        if self._improves(row):
            assert isinstance(pl_module.evaluated, torch.nn.Module)
            self.weights = copy.deepcopy(pl_module.evaluated.state_dict())
        self._end_early(trainer, pl_module)
        if self.watch is not None and self.watch(self.rows):
            trainer.should_stop = True
