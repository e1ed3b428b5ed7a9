"""The training of classifiers and regressors of series."""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from kernel_attention.models import SequenceClassifier
from kernel_attention_lab.data import Batch
from kernel_attention_lab.data.series.augmentation import augment, augment_unscaled, mix_series
from kernel_attention_lab.training.module import AveragedTask, SequenceTask
from kernel_attention_lab.training.rocket_features import OnFeatures
from kernel_attention_lab.training.time_series_recipe import Recipe


class TimeSeriesTask(AveragedTask, SequenceTask):
    """Cross-entropy, or the mean squared error, of augmented and mixed series.

    With mixup, ``train_accuracy`` is that of the larger part of the mixture. Where cases have weights, losses
    and accuracies are weighted.

    Args:
        model: (x, attention_mask) -> (B, outputs).
        recipe: augmentation, optimizer, schedule.
        is_regression: outputs are values, not class logits.
        max_seconds: training ends after the step at which it has taken this long; 0 sets no limit. The
            schedule of the learning rate then follows the clock where the clock is ahead of the steps.
    """

    model: SequenceClassifier | OnFeatures
    recipe: Recipe

    def __init__(
        self,
        model: SequenceClassifier | OnFeatures,
        recipe: Recipe,
        is_regression: bool = False,
        max_seconds: float = 0.0,
    ) -> None:
        super().__init__(model, recipe, is_regression)
        self.max_seconds = max_seconds
        self.start_average(recipe.ema_decay)
        self._started: float | None = None

    def training_step(self, batch: Batch) -> Tensor:
        """The task's loss of the batch, augmented and mixed as the recipe says."""
        recipe = self.recipe
        if not recipe.augmentation and not recipe.mixup:
            return super().training_step(batch)
        (mean, std), mask = self.model.encoder.scale_in(batch.x.dtype), batch.attention_mask
        if not recipe.mixup:
            x = augment_unscaled(batch.x, mask, recipe.augmentation, mean, std)
            return super().training_step(batch._replace(x=x))
        scaled = augment((batch.x - mean) / std, mask, recipe.augmentation)
        mixture = mix_series(scaled, mask, recipe.mixup)
        x = mixture.x * std + mean
        outputs = self.model(x, mixture.attention_mask).float()
        own, metric, value = self._measure(outputs, batch, mixture.weight)
        assert batch.target is not None
        partners = batch._replace(
            target=batch.target[mixture.partner],
            weight=None if batch.weight is None else batch.weight[mixture.partner],
        )
        loss = own + self._measure(outputs, partners, 1 - mixture.weight)[0]
        self._log_figures("train", loss, metric, value, len(batch.x))
        return loss

    def learning_rate_factor(self) -> Callable[[int], float] | None:
        """The recipe's schedule for this number of batches; None for a constant rate."""
        recipe = self.recipe
        if recipe.schedule == "constant" and not recipe.warmup_epochs:
            return None
        steps = self.trainer.total_steps
        steps_per_epoch = -(-steps // recipe.epochs)
        return lambda step: recipe.learning_rate_factor(
            max(step, self._steps_by_clock(steps)), steps_per_epoch
        )

    def on_train_start(self) -> None:
        self._started = time.monotonic()

    def after_step(self) -> None:
        """Also end training where its time is over."""
        super().after_step()
        if self.max_seconds and self._elapsed() >= self.max_seconds:
            self.trainer.should_stop = True

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else time.monotonic() - self._started

    def _steps_by_clock(self, steps: int) -> int:
        """The step at which the schedule would be if it followed the clock alone."""
        return int(steps * min(self._elapsed() / self.max_seconds, 1.0)) if self.max_seconds else 0

    def _measure(
        self, outputs: Tensor, batch: Batch, share: Tensor | None = None
    ) -> tuple[Tensor, str, Tensor]:
        """The loss with the recipe's label smoothing, where each case counts by its weight and ``share``."""
        is_plain = batch.weight is None and share is None
        if is_plain and not (self.training and self.recipe.label_smoothing):
            return super()._measure(outputs, batch)
        assert batch.target is not None
        weight = outputs.new_ones(len(outputs)) if batch.weight is None else batch.weight
        if self.is_regression:
            errors = F.mse_loss(outputs.squeeze(-1), batch.target, reduction="none")
            metric, values = "mse", errors.flatten(1).mean(dim=1) if errors.dim() > 1 else errors
            losses = values
        else:
            metric, values = "accuracy", (outputs.argmax(dim=-1) == batch.target).float()
            smoothing = self.recipe.label_smoothing if self.training else 0.0
            losses = F.cross_entropy(outputs, batch.target, reduction="none", label_smoothing=smoothing)
        total = weight.sum().clamp_min(weight.new_tensor(1e-12))
        loss = (losses * weight * (1.0 if share is None else share)).sum() / len(losses)
        return loss, metric, (values.detach() * weight).sum() / total
