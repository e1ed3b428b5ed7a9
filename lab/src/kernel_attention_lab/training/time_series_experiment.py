"""Time series by name: classification and regression of whole sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import Batch, SequenceSplit, Standardizer, make_loader, stratified_split
from kernel_attention.series.outputs import require_in_range
from kernel_attention.series.readout import fit_readout
from kernel_attention.series.rocket_features import fit_input, series_features
from kernel_attention.series.task import TimeSeriesTask
from kernel_attention_lab.data import SeriesColumns, is_series_file, load_series_files, load_time_series
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.training.evaluation import (
    evaluate_split,
    fitting_file,
    kernel_spectra,
    labelled_split,
    predict_rows,
)
from kernel_attention_lab.training.experiment import Experiment, Loaders, Metric
from kernel_attention_lab.training.facts import check_facts, describe_data
from kernel_attention_lab.training.recorder import RunRecorder
from kernel_attention_lab.training.time_series_recipe import Recipe

_DIAGNOSED_AT_ONCE = 8


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
        check_facts(facts, path)

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
        return describe_data(self.data)

    def loaders(self, seed: int) -> Loaders:
        train, val, _ = split_data(self.data, self.recipe, seed)
        size = self.recipe.effective_batch
        return make_loader(self._weighted(train), size, shuffle=True, seed=seed), make_loader(val, size)

    def prepare(self, model: SequenceClassifier, seed: int) -> None:
        train = self._weighted(split_data(self.data, self.recipe, seed).train)
        fit_input(model.encoder, train.sequences)
        if self.recipe.readout:
            fit_readout(model, series_features(model, train.sequences), train, self.is_regression)

    def _weighted(self, train: SequenceSplit) -> SequenceSplit:
        """The training cases with the weights that the recipe gives them."""
        is_balanced = self.recipe.class_weight == "balanced" and not self.is_regression
        return train.balanced() if is_balanced else train

    def task(self, model: Any) -> TimeSeriesTask:
        return TimeSeriesTask(
            model, self.recipe.train_settings(), self.recipe.series_training(), self.is_regression
        )

    def recorder(self, folder: Path, seed: int) -> RunRecorder:
        val = split_data(self.data, self.recipe, seed).selection
        return RunRecorder(folder, self.recipe, float(np.var(val.targets)) if self.is_regression else None)

    def evaluate(self, model: SequenceClassifier) -> dict[str, Any]:
        return evaluate_split(model, self.test, self.recipe, self.is_regression)

    @staticmethod
    def evaluate_file(
        model: SequenceClassifier, file: Path, recipe: Recipe, facts: dict[str, Any]
    ) -> dict[str, Any]:
        split = labelled_split(file, facts, recipe.missing, columns_of(recipe))
        return evaluate_split(model, split, recipe, facts["task"] == "regression")

    @staticmethod
    def predict(
        model: SequenceClassifier, file: Path, recipe: Recipe, facts: dict[str, Any]
    ) -> list[dict[str, Any]]:
        columns = dataclasses.replace(columns_of(recipe), reads_target=False)
        found = fitting_file(file, facts, recipe.missing, columns)
        return predict_rows(model, found.sequences, facts, recipe.precision, found.cases)

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
