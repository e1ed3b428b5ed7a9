"""The files that a run writes after every epoch, and the state from which it resumes exactly."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
from lightning.pytorch.callbacks import Checkpoint

from kernel_attention.experiments.run_folder import kept_weights_path
from kernel_attention.experiments.training.files import write_csv, write_json, write_weights
from kernel_attention.experiments.training.stopping import StopRequest


class RunRecorder(Checkpoint):
    """Metrics, best and last weights, and the trainer's state: at step 0 and at every epoch's end.

    ``last.ckpt`` is written last and by rename, so it decides where a run resumes: files written after the
    previous checkpoint are written again, identically, by the resumed run.

    Ctrl-C and SIGTERM stop training after the current step, with a checkpoint of that step. After the last
    step of an epoch, the evaluation and the checkpoint of the epoch come first.

    Args:
        folder: the seed's folder.
        target_variance: variance of the evaluated targets, for R^2; None for classification.
        quality: the figure that chooses the epoch, the higher the better. Rows without it have the loss.

    Attributes:
        told: called with every row that has been written, and the number of steps.
    """

    def __init__(self, folder: Path, target_variance: float | None = None, quality: str = "accuracy") -> None:
        self.folder = folder
        self.target_variance = target_variance
        self.quality = quality
        self.rows: list[dict[str, Any]] = []
        self.best_epoch: int | None = None
        self.best: tuple[float, float] | None = None
        self.told: Callable[[dict[str, Any], int], object] | None = None
        self._generators: dict[str, Any] | None = None
        self._partial: dict[str, Any] | None = None
        self._started = 0.0
        self._stop = StopRequest()

    @property
    def checkpoint(self) -> Path:
        """The trainer's state."""
        return self.folder / "last.ckpt"

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write a checkpoint of step 0; a run that stopped inside an epoch continues after its last batch."""
        self._stop.listen()
        if trainer.global_step == 0:
            self._keep_weights(pl_module, 0)
            trainer.save_checkpoint(self.checkpoint)
        if self._partial is not None:
            loader: Any = trainer.train_dataloader
            loader.sampler.skip(self._partial["batches"], loader.batch_size or 1)
            self._started = time.perf_counter() - self._partial["seconds"]
        self._end_early(trainer, pl_module)

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._started = time.perf_counter()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Continue with the random numbers of the interrupted run."""
        if self._generators is not None:
            _set_generators(self._generators)
            self._generators = None

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the sums of the interrupted run to those of this epoch; stop here after a signal."""
        sums = trainer.fit_loop.epoch_loop._results
        if self._partial is not None:
            _add_sums(sums, self._partial["sums"])
            self._partial = None
        is_last = batch_idx + 1 == trainer.num_training_batches
        if self._stop.is_made and not is_last:
            self._partial = self._state_within_epoch() | {"batches": batch_idx + 1, "sums": _get_sums(sums)}
            trainer.save_checkpoint(self.checkpoint)
            raise KeyboardInterrupt

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Write all files, the checkpoint last."""
        row = self._row(trainer)
        self.rows.append(row)
        weights = _weights(pl_module)
        if self._improves(row):
            write_weights(self.folder / "best.safetensors", weights)
        write_weights(self.folder / "last.safetensors", weights)
        self._keep_weights(pl_module, row["epoch"])
        write_json(self.folder / "metrics.json", self.rows)
        write_csv(self.folder / "metrics.csv", self.rows)
        trainer.save_checkpoint(self.checkpoint)
        if self.told is not None:
            self.told(row, trainer.global_step)
        if self._stop.is_made:
            raise KeyboardInterrupt
        self._end_early(trainer, pl_module)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop.leave()
        if self._stop.is_made:
            raise KeyboardInterrupt

    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop.leave()

    def state_dict(self) -> dict[str, Any]:
        """The state in the trainer's checkpoint."""
        return {
            "rows": self.rows,
            "best_epoch": self.best_epoch,
            "best": self.best,
            "partial": self._partial,
            # Those of a loaded checkpoint stay here until the step that takes them over starts.
            "generators": self._generators or _get_generators(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Read the state in the trainer's checkpoint; the generators are set when the first step starts."""
        self.rows = state_dict["rows"]
        self.best_epoch = state_dict["best_epoch"]
        self.best = state_dict["best"]
        self._partial = state_dict.get("partial")  # earlier versions wrote checkpoints only between epochs
        self._generators = state_dict["generators"]

    def _keep_weights(self, pl_module: L.LightningModule, epoch: int) -> None:
        """Write the copy of this epoch where the recipe has one; 0 is before the first step."""
        recipe: Any = pl_module.recipe
        every = recipe.keep_weights_every
        if every and epoch % every == 0:
            write_weights(kept_weights_path(self.folder, epoch), _weights(pl_module))

    def _end_early(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """End training where the recipe has a patience that is used up."""
        recipe: Any = pl_module.recipe
        patience = getattr(recipe, "patience", 0)
        since = [row for row in self.rows if "val_loss" in row and row["epoch"] > (self.best_epoch or 0)]
        if patience and len(since) >= patience:
            trainer.should_stop = True

    def _state_within_epoch(self) -> dict[str, Any]:
        """The counts of the row of an unfinished epoch, in addition to the sums of its figures."""
        return {"seconds": time.perf_counter() - self._started}

    def choice(self) -> dict[str, Any]:
        """The entries of ``evaluation.json`` about the round whose weights were chosen."""
        return {"best_epoch": self.best_epoch}

    def _row(self, trainer: L.Trainer) -> dict[str, Any]:
        figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
        is_evaluated = (trainer.current_epoch + 1) % (trainer.check_val_every_n_epoch or 1) == 0
        row: dict[str, Any] = {"epoch": trainer.current_epoch + 1}
        for name, value in sorted(figures.items()):
            stage, _, metric = name.partition("_")
            if stage == "val" and not is_evaluated:
                continue  # Lightning keeps the figures of the last evaluation
            if not math.isfinite(value):
                raise FloatingPointError(f"{name} is {value} in epoch {trainer.current_epoch + 1}")
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


def _weights(pl_module: L.LightningModule) -> dict[str, Any]:
    """The evaluated weights of the task, under the model's own names."""
    assert isinstance(pl_module.evaluated, torch.nn.Module)
    return pl_module.evaluated.state_dict()


def _get_sums(results: Any) -> dict[str, Any]:
    """Lightning's running sums of an epoch's figures, which are no part of its checkpoints."""
    return {key: (figure.value, figure.cumulated_batch_size) for key, figure in results.items()}


def _add_sums(results: Any, sums: dict[str, Any]) -> None:
    """Add these sums to the first figures since; the order does not matter, x + y is y + x in every bit."""
    for key, (value, weight) in sums.items():
        figure = results[key]
        figure.value = value.to(figure.value) + figure.value
        figure.cumulated_batch_size = weight.to(figure.cumulated_batch_size) + figure.cumulated_batch_size


def _get_generators() -> dict[str, Any]:
    """States of all global generators, in types that ``weights_only`` loading accepts."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": [str(kind), [int(key) for key in keys], *rest],
        "python": random.getstate(),
    }


def _set_generators(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
