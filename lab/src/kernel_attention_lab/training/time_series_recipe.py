"""The recipe of a training on time series."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from kernel_attention.errors import InputError
from kernel_attention.fields import (
    DIFFERENT,
    UNIQUE,
    Count,
    NonNegative,
    Part,
    Probability,
    Whole,
    field_names,
)
from kernel_attention_lab.training.recipe import EpochRecipe
from kernel_attention_lab.training.tasks import DEFAULT_TASK

if TYPE_CHECKING:
    from kernel_attention.series.settings import SeriesTraining


@dataclass(frozen=True)
class Recipe(EpochRecipe):
    """One experiment on a time-series set; the defaults are those of Primal-Attention's UEA experiments.

    Args:
        dataset: name of an aeon classification or regression set, or a file of labelled series: .ts, .csv,
            .tsv, .parquet or .npz.
        test_file: file of the test split, where dataset is a file; without it a part of the cases is.
        test_fraction: this part, drawn with seed 0.
        target_type: whether the targets of a file are classes or values; auto takes values where all are
            numbers and one is not whole.
        layout: of a table: long, a step a row; wide, a case a row; auto takes long where time_column is
            given.
        case_column: column of a table that names the case.
        time_column: column of a long table that orders the steps of a case.
        target_column: column of a table with the label or the value to predict.
        channel_columns: columns of the channels in a long table, or the names before the steps in a wide
            one; by default all other columns.
        stem: how steps become tokens: a linear projection, multi-scale convolutions, or random ones (rocket).
        stem_layers: blocks of the convolution stem.
        patch_len: steps per token; 0 takes as many as leave at most 128 tokens of the longest series, or 8
            of a rocket stem.
        views: what the stem reads: raw, normalized (per series) and difference, side by side.
        pooling: flatten all positions, average them, mean_max for average and maximum, or attention.
        readout: whether the model averages its outputs with those of a least-squares support vector machine
            on the features of a rocket stem.
        missing: what to do with missing values: auto, interpolate or error.
        warmup_epochs: epochs in which the learning rate grows linearly to ``learning_rate``.
        schedule: after the warm-up: constant, or falling along a cosine to 0.
        label_smoothing: weight of the uniform distribution in the targets of training.
        class_weight: none, or balanced, which gives all classes of the training cases the same weight.
        augmentation: what changes the series in training, in turn: jitter, scale, time_warp, window, cut.
        mixup: alpha of mixup's Beta distribution; 0 switches it off.
        ema_decay: the evaluated weights are an exponential moving average with this decay; 0 evaluates the
            trained weights themselves.
        patience: training ends after this many evaluations without a better one; 0 never ends it early.

    The other keys are those of ``EpochRecipe``.
    """

    task_name: ClassVar[str] = DEFAULT_TASK

    stem: Literal["linear", "convolution", "rocket"] = "linear"
    stem_layers: Count = 3
    patch_len: Whole = 1
    views: Annotated[list[Literal["raw", "normalized", "difference"]], *DIFFERENT] = field(
        default_factory=lambda: ["raw"]
    )
    pooling: Literal["flatten", "mean", "mean_max", "attention"] = "flatten"
    readout: bool = False
    missing: Literal["auto", "interpolate", "error"] = "auto"
    warmup_epochs: Whole = 0
    schedule: Literal["constant", "cosine"] = "constant"
    label_smoothing: Probability = 0.0
    class_weight: Literal["none", "balanced"] = "none"
    augmentation: Annotated[list[Literal["jitter", "scale", "time_warp", "window", "cut"]], *UNIQUE] = field(
        default_factory=list
    )
    mixup: NonNegative = 0.0
    ema_decay: Probability = 0.0
    patience: Whole = 0
    test_file: str = ""
    test_fraction: Part = 0.2
    target_type: Literal["auto", "class", "value"] = "auto"
    layout: Literal["auto", "long", "wide"] = "auto"
    case_column: str = ""
    time_column: str = ""
    target_column: str = "target"
    channel_columns: Annotated[list[str], *UNIQUE] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_epochs >= self.epochs:
            raise InputError(f"warmup_epochs={self.warmup_epochs} must be below epochs={self.epochs}")
        if self.readout and self.stem != "rocket":
            raise InputError(f"readout=true needs stem=rocket, whose features it reads, not stem={self.stem}")
        if self.sequence_shards > 1 and (self.augmentation or self.mixup):
            raise InputError(
                f"sequence_shards={self.sequence_shards} with augmentation={self.augmentation} and "
                f"mixup={self.mixup:g}: they change whole series (accepted: [] and 0)"
            )

    def series_training(self) -> SeriesTraining:
        """The loss, the schedule and the augmentation."""
        from kernel_attention.series.settings import SeriesTraining  # brings torch

        return SeriesTraining(**{name: getattr(self, name) for name in field_names(SeriesTraining)})

    def encoder_options(self) -> dict[str, Any]:
        """The fields that ``kernel_attention.models.SequenceClassifier`` takes."""
        names = ("stem", "stem_layers", "patch_len", "views", "pooling", "readout")
        return super().encoder_options() | {name: getattr(self, name) for name in names}
