"""Classification and regression of whole time series."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from kernel_attention.analysis import diagnose
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
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import Batch, SequenceSplit, Standardizer, make_loader, stratified_split
from kernel_attention.series.files.layouts import require_target
from kernel_attention.series.outputs import predict_outputs, require_in_range
from kernel_attention.series.rocket_features import fit_input, series_features
from kernel_attention.series.settings import SeriesTraining
from kernel_attention.series.task import TimeSeriesTask
from kernel_attention_lab.data import (
    SeriesColumns,
    SeriesFile,
    is_series_file,
    load_series_files,
    load_time_series,
    read_series_file,
)
from kernel_attention_lab.data.series.own_files import (
    label_texts,
    order_channels,
    target_values,
)
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.tasks.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.tasks.metrics import class_rows, classification_metrics
from kernel_attention_lab.tasks.recipe import EpochRecipe
from kernel_attention_lab.tasks.registry import register_task

_DIAGNOSED_AT_ONCE = 8
_SPECTRUM_SEQUENCES = 16  # each costs an N x N decomposition per head and layer
_SPECTRUM_LENGTH = 1024


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

    task_name: ClassVar[str] = "time_series"

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


@register_task(Recipe)
class TimeSeriesExperiment(Experiment):
    """Classification or regression of whole time series, described by a ``Recipe``."""

    recipe: Recipe
    required_facts: ClassVar[tuple[str, ...]] = ("num_features", "max_len")
    divides_sequences: ClassVar[bool] = True

    def __init__(self, recipe: Recipe, data_root: str | Path | None = None) -> None:
        super().__init__(recipe, data_root)
        self.data = load_data(recipe, data_root)

    @staticmethod
    def build_model(recipe: Recipe, facts: dict[str, Any]) -> SequenceClassifier:
        num_outputs = len(facts["class_names"]) or 1
        shape = (facts["num_features"], num_outputs, facts["max_len"])
        return SequenceClassifier(*shape, **recipe.encoder_options())

    @classmethod
    def check_facts(cls, facts: Any, path: Path) -> None:
        names = facts.get("class_names") if isinstance(facts, dict) else None
        is_right = (
            isinstance(names, list)
            and all(isinstance(name, str) for name in names)
            and facts.get("task") == ("classification" if names else "regression")
            and all(isinstance(facts.get(key), int) and facts[key] > 0 for key in ("num_features", "max_len"))
        )
        if not is_right:
            raise InputError(
                f"{path}: does not describe a data set (num_features, max_len, task, class_names)"
            )
        channels = facts.get("channel_names")
        is_named = isinstance(channels, list) and all(isinstance(name, str) for name in channels)
        if channels is not None and not (
            is_named and len(set(channels)) == facts["num_features"] == len(channels)
        ):
            raise InputError(f"{path}: channel_names are not the names of {facts['num_features']} channels")

    @property
    def metric(self) -> Metric:
        return Metric("rmse", False) if self.is_regression else Metric("accuracy", True)

    @property
    def test(self) -> SequenceSplit:
        """The cases that the protocol reports."""
        return split_data(self.data, self.recipe, self.recipe.seeds[0]).test

    @property
    def is_regression(self) -> bool:
        """Return whether the model gives values instead of classes."""
        return self.data.task == "regression"

    def facts(self) -> dict[str, Any]:
        data = self.data
        named = {"channel_names": list(data.channel_names)} if data.channel_names else {}
        return {
            "dataset": data.name,
            "task": data.task,
            "num_features": data.num_features,
            "max_len": data.max_len,
            "class_names": list(data.class_names),
            "train_cases": len(data.train),
            "test_cases": len(data.test),
            **named,
        }

    def loaders(self, seed: int) -> Loaders:
        train, val, _ = split_data(self.data, self.recipe, seed)
        size = self.recipe.effective_batch
        return make_loader(self._weighted(train), size, shuffle=True, seed=seed), make_loader(val, size)

    def prepare(self, model: SequenceClassifier, seed: int) -> None:
        train = self._weighted(split_data(self.data, self.recipe, seed).train)
        fit_input(model.encoder, train.sequences)
        if self.recipe.readout:
            from kernel_attention.series.closed_form import fit_readout  # brings scikit-learn

            fit_readout(model, series_features(model, train.sequences), train, self.is_regression)

    def _weighted(self, train: SequenceSplit) -> SequenceSplit:
        """The training cases with the weights that the recipe gives them."""
        is_balanced = self.recipe.class_weight == "balanced" and not self.is_regression
        return train.balanced() if is_balanced else train

    def task(self, model: Any) -> TimeSeriesTask:
        return TimeSeriesTask(
            model, self.recipe.train_settings(), self.recipe.series_training(), self.is_regression
        )

    def target_variance(self, seed: int) -> float | None:
        val = split_data(self.data, self.recipe, seed).selection
        return float(np.var(val.targets)) if self.is_regression else None

    def evaluate(self, model: SequenceClassifier) -> dict[str, Any]:
        return evaluate_split(model, self.test, self.recipe, self.is_regression)

    @staticmethod
    def evaluate_file(
        model: SequenceClassifier, file: Path, recipe: Recipe, facts: dict[str, Any]
    ) -> dict[str, Any]:
        split = labelled_split(file, recipe, facts)
        return evaluate_split(model, split, recipe, facts["task"] == "regression")

    @staticmethod
    def predict(
        model: SequenceClassifier, file: Path, recipe: Recipe, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        found = fitting_file(file, recipe, facts, reads_target=False)
        outputs = predict_outputs(model, found.sequences, precision=recipe.precision)
        named = range(len(found.sequences)) if found.cases is None else found.cases
        if facts["task"] == "classification":
            return class_rows(outputs.softmax(dim=-1), facts["class_names"], named)
        values = outputs.squeeze(-1).tolist()
        return [{"case": case, "prediction": value} for case, value in zip(named, values, strict=True)]

    def appendices(self, model: SequenceClassifier) -> dict[str, Any]:
        return {"spectra.json": kernel_spectra(model, self.test)}

    def check(self) -> None:
        self.check_model()
        train = split_data(self.data, self.recipe, self.recipe.seeds[0]).train
        scale = Standardizer.fit(train.sequences)
        for name, split in (("training", self.data.train), ("test", self.data.test)):
            require_in_range(split.sequences, scale.mean, scale.std, f"the {name} split")

    def batches(self, cases: int) -> Iterable[Batch]:
        test = self.test
        places = np.linspace(0, len(test) - 1, min(cases, len(test))).round().astype(int)
        return make_loader([test.sequences[place] for place in places], _DIAGNOSED_AT_ONCE)


def columns_of(recipe: Recipe) -> SeriesColumns:
    """The columns of a table, as the recipe names them."""
    return SeriesColumns(
        recipe.layout, recipe.case_column, recipe.time_column, recipe.target_column, recipe.channel_columns
    )


def load_data(recipe: Recipe, data_root: str | Path | None = None) -> TimeSeriesData:
    """The recipe's data set, by its name or from its files."""
    if not is_series_file(recipe.dataset):
        return load_time_series(recipe.dataset, data_root=data_root, missing=recipe.missing)
    return load_series_files(
        recipe.dataset,
        data_root,
        recipe.missing,
        columns=columns_of(recipe),
        test_file=recipe.test_file,
        test_fraction=recipe.test_fraction,
        target_type=recipe.target_type,
    )


class Parts(NamedTuple):
    """The cases that train, that select the epoch, and that are reported."""

    train: SequenceSplit
    selection: SequenceSplit
    test: SequenceSplit


def split_data(data: TimeSeriesData, recipe: Recipe, seed: int) -> Parts:
    """The data set under the recipe's protocol, see ``PROTOCOLS``. All seeds report the same cases."""
    if recipe.protocol == "holdout":
        return Parts(*stratified_split(data.train, recipe.validation_fraction, seed, data.task), data.test)
    if recipe.protocol == "paper":
        return Parts(data.train, data.test, data.test)
    first, last = divide_test(data)
    if recipe.protocol == "thesis-1":
        return Parts(data.train, first, first)
    return Parts(data.train.joined(first), last, last)


def divide_test(data: TimeSeriesData) -> tuple[SequenceSplit, SequenceSplit]:
    """The KMLSVD thesis's division of a test split, in file order: (all but the last fifth, the last fifth).

    The last fifth of n cases is floor(n / 5) of them. The thesis does not say how it rounds, but its largest
    accuracies are fractions of whole cases: of 52, 34 and 58 cases on EthanolConcentration, PEMS-SF and
    SelfRegulationSCP1 (table 4-8), whose test splits have 263, 173 and 293.

    Raises:
        InputError: for fewer than five cases.
    """
    cases, last = np.arange(len(data.test)), len(data.test) // 5
    if not last:
        raise InputError(
            f"the test split of {data.name} has {len(data.test)} cases; the protocols thesis-1 and thesis-3 "
            "need at least 5"
        )
    return data.test.subset(cases[:-last]), data.test.subset(cases[-last:])


def evaluate_split(
    model: SequenceClassifier, split: SequenceSplit, recipe: Recipe, is_regression: bool
) -> dict[str, Any]:
    """Loss and metric of a split; the confusion matrix (rows: true classes) in classification."""
    outputs = predict_outputs(model, split, recipe.batch_size, recipe.precision)
    if is_regression:
        from sklearn.metrics import r2_score  # takes seconds, and some commands only list recipes

        error = F.mse_loss(outputs.squeeze(-1), torch.as_tensor(split.targets).float()).item()
        r2 = float(r2_score(split.targets, outputs.squeeze(-1).numpy())) if len(split) > 1 else None
        return {"rmse": error**0.5, "r2": r2, "loss": error, "cases": len(split)}
    return classification_metrics(outputs, split.targets)


def kernel_spectra(model: SequenceClassifier, split: SequenceSplit) -> dict[str, Any]:
    """The content of ``spectra.json``: spectra of every layer's kernel on the first test sequences."""
    sequences = [sequence for sequence in split.sequences if len(sequence) <= _SPECTRUM_LENGTH]
    if not sequences:
        return {"layers": [], "note": f"no test sequence of at most {_SPECTRUM_LENGTH} steps"}
    batches = make_loader(sequences[:_SPECTRUM_SEQUENCES], 4)
    report = diagnose(model, batches, cases=_SPECTRUM_SEQUENCES, quantities=("spectrum",))
    layers = [
        {
            "layer": layer.index,
            "mechanism": layer.mechanism,
            "singular_values": layer.values["singular_values"].tolist(),
        }
        for layer in report.layers
        if "singular_values" in layer.values
    ]
    count = min(len(sequences), _SPECTRUM_SEQUENCES)
    return {"layers": layers, "note": f"means over {count} test sequences of values relative to the largest"}


def fitting_file(
    path: Path, recipe: Recipe, facts: dict[str, Any], *, reads_target: bool = True
) -> SeriesFile:
    """The series of a file, checked against the facts of the training data, with its channels in their order.

    Raises:
        InputError: for a bad file, other channels and longer series than the model takes.
    """
    columns = dataclasses.replace(columns_of(recipe), reads_target=reads_target)
    names = facts.get("channel_names") or list(columns.channels)
    file = order_channels(read_series_file(path, recipe.missing, columns), names, str(path), "the run")
    for case, sequence in enumerate(file.sequences):
        channels = sequence.shape[1]
        if channels != facts["num_features"]:
            raise InputError(
                f"{path}: case {case} has {channels} channels, the model takes {facts['num_features']}"
            )
        if len(sequence) > facts["max_len"]:
            raise InputError(
                f"{path}: case {case} has {len(sequence)} steps, the model takes at most {facts['max_len']} "
                "(the longest sequence of its data set)"
            )
    return file


def labelled_split(path: Path, recipe: Recipe, facts: dict[str, Any]) -> SequenceSplit:
    """The sequences and targets of a labelled file, checked against the facts of the training data."""
    require_target(path, columns_of(recipe))
    file = fitting_file(path, recipe, facts)
    if file.labels is None:
        raise InputError(f"{path}: has no labels to evaluate against")
    labels = label_texts(file, str(path))
    if facts["task"] == "regression":
        try:
            return SequenceSplit(file.sequences, target_values(labels, str(path)))
        except InputError as error:
            raise InputError(
                f"{error}: the model predicts values, but the labels are not finite numbers"
            ) from None
    names = list(facts["class_names"])
    unseen = sorted(set(labels) - set(names))
    if unseen:
        raise InputError(f"{path}: labels {unseen} were not seen in training (accepted: {', '.join(names)})")
    return SequenceSplit(file.sequences, np.array([names.index(label) for label in labels], dtype=np.int64))
