"""The training of classifiers and regressors of sequences."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.limits import now
from kernel_attention.models import SequenceClassifier
from kernel_attention.series.augmentation import augment, augment_unscaled, mix_series
from kernel_attention.series.rocket_features import OnFeatures
from kernel_attention.series.settings import SeriesTraining
from kernel_attention.series.splits import Batch
from kernel_attention.training.settings import TrainSettings
from kernel_attention.training.task import AveragedTask, SameLossTask


class SequenceTask(SameLossTask):
    """Classification (cross-entropy) or regression (mean squared error) of sequences.

    Logs per epoch: ``train_loss`` (the task's own), ``train_accuracy`` or ``train_mse``,
    ``objective_layer_i`` (J), and the same ``val_`` figures.

    Args:
        model: (x, attention_mask) -> (B, outputs).
        settings: of the loop.
        is_regression: outputs are values, not class logits.
        schedule: as in ``TrainingTask``.
    """

    def __init__(
        self,
        model: nn.Module,
        settings: TrainSettings,
        is_regression: bool = False,
        schedule: Callable[[int], float] | None = None,
    ) -> None:
        super().__init__(model, settings, schedule)
        self.is_regression = is_regression

    def part(self, batch: Batch, number: int, parts: int) -> Batch:
        """Every part has a token or more; those beyond the end of a short sequence are padding."""
        x, mask = batch.arguments
        features = x.dim() - mask.dim()  # dimensions behind that of the tokens
        if (missing := parts - mask.size(-1)) > 0:
            mask, x = F.pad(mask, (0, missing)), F.pad(x, (0, 0) * features + (0, missing))
        first, end = (mask.size(-1) * place // parts for place in (number, number + 1))
        x = x.narrow(mask.dim() - 1, first, end - first)
        return batch._replace(x=x, attention_mask=mask[..., first:end])

    def _log_step(self, stage: str, batch: Batch) -> Tensor:
        assert batch.target is not None, "training and evaluation need labelled batches"
        model = self.model if stage == "train" else self.evaluated
        loss, metric, value = self._measure(model(*batch.arguments).float(), batch)
        self._log_figures(stage, loss, metric, value, len(batch.x))
        return loss

    def _log_figures(self, stage: str, loss: Tensor, metric: str, value: Tensor, cases: int) -> None:
        figures = {f"{stage}_loss": loss.detach(), f"{stage}_{metric}": value}
        self.log_dict(figures, cases)

    def _measure(self, outputs: Tensor, batch: Batch) -> tuple[Tensor, str, Tensor]:
        """(loss, name of the figure beside it, its value) of a batch."""
        target = batch.target
        assert target is not None
        if self.is_regression:
            loss = F.mse_loss(outputs.squeeze(-1), target)
            return loss, "mse", loss.detach()
        accuracy = (outputs.argmax(dim=-1) == target).float().mean()
        return F.cross_entropy(outputs, target), "accuracy", accuracy


class TimeSeriesTask(AveragedTask, SequenceTask):
    """Cross-entropy, or the mean squared error, of augmented and mixed series.

    With mixup, ``train_accuracy`` is that of the larger part of the mixture. Where cases have weights, losses
    and accuracies are weighted.

    Args:
        model: (x, attention_mask) -> (B, outputs).
        settings: of the loop.
        training: schedule, augmentation, smoothing and average.
        is_regression: outputs are values, not class logits.
        max_seconds: training ends after the step at which it has taken this long; 0 sets no limit. The
            schedule of the learning rate then follows the clock where the clock is ahead of the steps.
    """

    model: SequenceClassifier | OnFeatures

    def __init__(
        self,
        model: SequenceClassifier | OnFeatures,
        settings: TrainSettings,
        training: SeriesTraining,
        is_regression: bool = False,
        max_seconds: float = 0.0,
    ) -> None:
        super().__init__(model, settings, is_regression)
        self.series = training
        self.max_seconds = max_seconds
        self.start_average(training.ema_decay)
        self._started: float | None = None

    def training_step(self, batch: Batch) -> Tensor:
        """The task's loss of the batch, augmented and mixed as the settings say."""
        series = self.series
        if not series.augmentation and not series.mixup:
            return super().training_step(batch)
        (mean, std), mask = self.model.encoder.scale_in(batch.x.dtype), batch.attention_mask
        if not series.mixup:
            x = augment_unscaled(batch.x, mask, series.augmentation, mean, std)
            return super().training_step(batch._replace(x=x))
        scaled = augment((batch.x - mean) / std, mask, series.augmentation)
        mixture = mix_series(scaled, mask, series.mixup)
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
        """The schedule for this number of batches; None for a constant rate."""
        series = self.series
        if series.schedule == "constant" and not series.warmup_epochs:
            return None
        steps = self.trainer.total_steps
        steps_per_epoch = -(-steps // series.epochs)
        return lambda step: series.learning_rate_factor(
            max(step, self._steps_by_clock(steps)), steps_per_epoch
        )

    def on_train_start(self) -> None:
        self._started = now()

    def after_step(self) -> None:
        """Also end training where its time is over."""
        super().after_step()
        if self.max_seconds and self._elapsed() >= self.max_seconds:
            self.trainer.should_stop = True

    def _elapsed(self) -> float:
        return 0.0 if self._started is None else now() - self._started

    def _steps_by_clock(self, steps: int) -> int:
        """The step at which the schedule would be if it followed the clock alone."""
        return int(steps * min(self._elapsed() / self.max_seconds, 1.0)) if self.max_seconds else 0

    def _measure(
        self, outputs: Tensor, batch: Batch, share: Tensor | None = None
    ) -> tuple[Tensor, str, Tensor]:
        """The loss with label smoothing, where each case counts by its weight and ``share``."""
        is_plain = batch.weight is None and share is None
        if is_plain and not (self.training and self.series.label_smoothing):
            return super()._measure(outputs, batch)
        assert batch.target is not None
        weight = outputs.new_ones(len(outputs)) if batch.weight is None else batch.weight
        if self.is_regression:
            errors = F.mse_loss(outputs.squeeze(-1), batch.target, reduction="none")
            metric, values = "mse", errors.flatten(1).mean(dim=1) if errors.dim() > 1 else errors
            losses = values
        else:
            metric, values = "accuracy", (outputs.argmax(dim=-1) == batch.target).float()
            smoothing = self.series.label_smoothing if self.training else 0.0
            losses = F.cross_entropy(outputs, batch.target, reduction="none", label_smoothing=smoothing)
        total = weight.sum().clamp_min(weight.new_tensor(1e-12))
        loss = (losses * weight * (1.0 if share is None else share)).sum() / len(losses)
        return loss, metric, (values.detach() * weight).sum() / total
