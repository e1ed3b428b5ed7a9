"""The settings with which a model of series is trained, and those of a whole member of an estimator."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import (
    DIFFERENT,
    UNIQUE,
    Count,
    NonNegative,
    Part,
    Positive,
    Probability,
    Whole,
    check_fields,
)
from kernel_attention.mechanisms import ATTENTION_SPECS
from kernel_attention.specs import Choice
from kernel_attention.training.settings import Accelerator, TrainSettings, scheduled_factor

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]  # NumPy's generators take no larger one
Augmentations = Annotated[list[Literal["jitter", "scale", "time_warp", "window", "cut"]], *UNIQUE]
Views = Annotated[list[Literal["raw", "normalized", "difference"]], *DIFFERENT]


@dataclass(frozen=True)
class SeriesTraining:
    """The loss, the schedule and the augmentation of a training on series.

    Args:
        epochs: passes over the training data.
        warmup_epochs: epochs in which the learning rate grows linearly to its largest value.
        schedule: after the warm-up: constant, or falling along a cosine to 0.
        label_smoothing: weight of the uniform distribution in the targets of training.
        augmentation: what changes the series in training, in turn: jitter, scale, time_warp, window, cut.
        mixup: alpha of mixup's Beta distribution; 0 switches it off.
        ema_decay: the evaluated weights are an exponential moving average with this decay; 0 evaluates the
            trained weights themselves.

    Raises:
        InputError: for a value of the wrong type or out of its range.
    """

    epochs: Count
    warmup_epochs: Whole = 0
    schedule: Literal["constant", "cosine"] = "constant"
    label_smoothing: Probability = 0.0
    augmentation: Augmentations = field(default_factory=list)
    mixup: NonNegative = 0.0
    ema_decay: Probability = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.warmup_epochs >= self.epochs:
            raise InputError(f"warmup_epochs={self.warmup_epochs} must be below epochs={self.epochs}")

    def learning_rate_factor(self, step: int, steps_per_epoch: int) -> float:
        """The factor of the learning rate at step number ``step``, counted from 0."""
        warmup, steps = self.warmup_epochs * steps_per_epoch, self.epochs * steps_per_epoch
        return scheduled_factor(self.schedule, step, warmup, steps)


@dataclass(frozen=True)
class MemberSettings(SeriesTraining):
    """A model of series and its training.

    Args:
        attention: what ``SequenceEncoder`` takes, classes and functions too.
        embed_dim: model width d.
        num_heads: attention heads.
        num_layers: encoder layers.
        feedforward_dim: hidden width of the feed-forward networks.
        dropout: dropout probability.
        short_convolution: as in ``SequenceEncoder``.
        positions: as in ``SequenceEncoder``.
        stem: how steps become tokens: a linear projection, multi-scale convolutions, or random ones (rocket).
        stem_layers: blocks of the convolution stem.
        patch_len: steps per token; 0 chooses.
        views: what the stem reads: raw, normalized (per series) and difference, side by side.
        pooling: flatten all positions, average them, mean_max for average and maximum, or attention.
        readout: whether the model averages its outputs with those of a least-squares support vector machine
            on the features of a rocket stem.
        batch_size: sequences per step.
        optimizer: radam, adam or adamw.
        learning_rate: the largest of the schedule.
        weight_decay: weight decay of the optimizer.
        gradient_clip: largest norm of the gradient; 0 switches clipping off.
        validation_fraction: the fraction of the cases that is held out, where any are.
        patience: training ends after this many evaluations without a better one; 0 never ends it early.
        accelerator: where the model is trained; auto takes the fastest one available.
        seed: of all random numbers.

    The others are those of ``SeriesTraining``.
    """

    attention: Any = "primal"
    embed_dim: Count = 64
    num_heads: Count = 4
    num_layers: Annotated[int, Field(ge=1, le=10_000)] = 2  # a list of them is made before any other check
    feedforward_dim: Count = 128
    dropout: Probability = 0.1
    short_convolution: Whole = 0
    positions: Literal["learnt", "learnt_normal", "fixed", "time_absolute", "convolutional", "none"] = (
        "time_absolute"
    )
    stem: Literal["linear", "convolution", "rocket"] = "rocket"
    stem_layers: Count = 3
    patch_len: Whole = 0
    views: Views = field(default_factory=lambda: ["raw", "normalized"])
    pooling: Literal["flatten", "mean", "mean_max", "attention"] = "mean_max"
    readout: bool = False
    batch_size: Count = 16
    optimizer: Literal["radam", "adam", "adamw"] = "adamw"
    learning_rate: Positive = 2e-3
    weight_decay: NonNegative = 0.05
    gradient_clip: NonNegative = 4.0
    validation_fraction: Part = 0.2
    patience: Whole = 0
    accelerator: Accelerator = "auto"
    seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.named_layers()
        if self.readout and self.stem != "rocket":
            raise InputError(f"readout=true needs stem=rocket, whose features it reads, not stem={self.stem}")

    def named_layers(self) -> list[Choice]:
        """The mechanism of every layer that has a name; classes and functions make the others.

        Raises:
            InputError: for an unknown mechanism or option.
        """
        specs = ATTENTION_SPECS.per_layer(self.attention, self.num_layers)
        return [ATTENTION_SPECS.read(spec) for spec in specs if not callable(spec)]

    def encoder_options(self) -> dict[str, Any]:
        """The fields that ``kernel_attention.models.SequenceClassifier`` takes."""
        names = (
            "attention", "embed_dim", "num_heads", "num_layers", "feedforward_dim", "dropout",
            "short_convolution", "positions", "stem", "stem_layers", "patch_len", "views", "pooling",
            "readout",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}

    def train_settings(self) -> TrainSettings:
        """The settings of the loop."""
        return TrainSettings(
            rounds=self.epochs,
            optimizer=self.optimizer,
            learning_rate=self.learning_rate,
            weight_decay=self.weight_decay,
            gradient_clip=self.gradient_clip,
            accelerator=self.accelerator,
        )
