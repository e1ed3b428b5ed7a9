"""The Lightning module: task loss plus the layers' auxiliary loss, and the figures of an epoch."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from kernel_attention.core.objective import PenalizedAttention, auxiliary_loss
from kernel_attention.errors import InputError
from kernel_attention.experiments.data import Batch
from kernel_attention.experiments.training.recipe import BaseRecipe, StepRecipe

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "radam": torch.optim.RAdam,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "sgd": functools.partial(torch.optim.SGD, momentum=0.9),
}

_CHANGEABLE = (
    "epochs",
    "seeds",
    "threads",
    "accelerator",
    "loggers",
)  # keys that may change when a run is resumed


class RecipeTask(L.LightningModule):
    """The common part of tasks: optimizer, schedule, J of the layers, and the recipe in checkpoints.

    Args:
        model: a model that has ``layers``, or whose ``encoder`` has them; each has an ``attention``.
        recipe: optimizer, learning rate and the reduction of the auxiliary loss.
    """

    def __init__(self, model: nn.Module, recipe: BaseRecipe) -> None:
        super().__init__()
        self.model = model
        self.recipe = recipe
        self.objectives = {
            f"objective_layer_{index}": layer.attention
            for index, layer in enumerate(getattr(model, "encoder", model).layers)  # type: ignore[arg-type]
            if isinstance(layer.attention, PenalizedAttention)
        }

    def penalty(self, batch_size: int) -> Tensor:
        """Sum over layers of eta J^2 (Primal-Attention, eq. 10) after a forward in training; logs each J."""
        for name, layer in self.objectives.items():
            if layer.objective is not None:
                value = layer.objective.detach().mean()
                self.log(name, value, on_step=False, on_epoch=True, batch_size=batch_size)
        return auxiliary_loss(self.model, self.recipe.auxiliary_reduction)

    @property
    def evaluated(self) -> nn.Module:
        """The model whose weights are evaluated and saved."""
        return self.model

    def parameter_groups(self) -> Any:
        """What the optimizer takes: parameters, or groups of them with options of their own."""
        return self.model.parameters()

    def learning_rate_factor(self) -> Callable[[int], float] | None:
        """The factor of the learning rate at a step, counted from 0; None for a constant rate."""
        return self.recipe.learning_rate_factor if isinstance(self.recipe, StepRecipe) else None

    def configure_optimizers(self) -> Any:
        """The recipe's optimizer and schedule."""
        recipe = self.recipe
        optimizer = _OPTIMIZERS[recipe.optimizer](
            self.parameter_groups(), lr=recipe.learning_rate, weight_decay=recipe.weight_decay
        )
        factor = self.learning_rate_factor()
        if factor is None:
            return optimizer
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["recipe"] = self.recipe.keys()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Refuse the state of another recipe: to continue it gives the result of neither recipe."""
        current = self.recipe.keys()
        for key, value in checkpoint.get("recipe", {}).items():
            if key not in _CHANGEABLE and current.get(key) != value:
                raise InputError(
                    f"the checkpoint was written with {key}={value!r}, the run's config.yaml says "
                    f"{current.get(key)!r}: undo the change, or start a new run with it"
                )


class AveragedTask(RecipeTask):
    """A task that may evaluate an exponential moving average of its weights instead of the weights."""

    average: AveragedModel | None

    def start_average(self, decay: float) -> None:
        """Average with this decay; 0 evaluates the weights themselves."""
        self.average = None
        if decay:
            average = get_ema_multi_avg_fn(decay)
            self.average = AveragedModel(self.model, multi_avg_fn=average, use_buffers=True)

    @property
    def evaluated(self) -> nn.Module:
        """The moving average of the weights, where there is one."""
        return self.model if self.average is None else self.average.module

    def optimizer_step(self, *args: Any, **options: Any) -> None:
        """Also move the average; here, so that a checkpoint of this step holds it."""
        super().optimizer_step(*args, **options)
        if self.average is not None:
            self.average.update_parameters(self.model)


class SequenceTask(RecipeTask):
    """Classification (cross-entropy) or regression (mean squared error) of sequences.

    Logs per epoch: ``train_loss`` (the task's own), ``train_accuracy`` or ``train_mse``,
    ``objective_layer_i`` (J), and the same ``val_`` figures.

    Args:
        model: (x, attention_mask) -> (B, outputs).
        recipe: optimizer, learning rate and the reduction of the auxiliary loss.
        is_regression: outputs are values, not class logits.
    """

    def __init__(self, model: nn.Module, recipe: BaseRecipe, is_regression: bool = False) -> None:
        super().__init__(model, recipe)
        self.is_regression = is_regression

    def training_step(self, batch: Batch) -> Tensor:
        """Task loss + sum over layers of eta J^2 (Primal-Attention, eq. 10)."""
        loss = self._log_step("train", batch)
        return loss + self.penalty(len(batch.x))

    def validation_step(self, batch: Batch) -> None:
        """Log the task's loss and metric."""
        self._log_step("val", batch)

    def _log_step(self, stage: str, batch: Batch) -> Tensor:
        assert batch.target is not None, "training and evaluation need labelled batches"
        model = self.model if stage == "train" else self.evaluated
        loss, metric, value = self._measure(model(*batch.arguments).float(), batch)
        self._log_figures(stage, loss, metric, value, len(batch.x))
        return loss

    def _log_figures(self, stage: str, loss: Tensor, metric: str, value: Tensor, cases: int) -> None:
        figures = {f"{stage}_loss": loss.detach(), f"{stage}_{metric}": value}
        self.log_dict(figures, on_step=False, on_epoch=True, prog_bar=True, batch_size=cases)

    def _measure(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, str, Tensor]:
        """(loss, name of the figure beside it, its value) of a batch."""
        target = batch.target
        assert target is not None
        if self.is_regression:
            loss = F.mse_loss(outputs.squeeze(-1), target)
            return loss, "mse", loss.detach()
        accuracy = (outputs.argmax(dim=-1) == target).float().mean()
        return F.cross_entropy(outputs, target), "accuracy", accuracy
