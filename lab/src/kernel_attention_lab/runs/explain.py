"""Predictions of series by runs and by estimators in files, and their explanation by integrated gradients."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.estimators.importance import integrated_gradients
from kernel_attention.series.outputs import predict_outputs
from kernel_attention.weights import read_metadata
from kernel_attention_lab.data import SeriesColumns, SeriesFile, read_series_file
from kernel_attention_lab.data.series.own_files import order_channels
from kernel_attention_lab.runs.saved import SavedRun
from kernel_attention_lab.tasks.time_series import Recipe, fitting_file


class Explanation(NamedTuple):
    """A prediction and what it rests on.

    Attributes:
        case: the name of the case, or its number.
        prediction: the class or the value.
        probability: of the class; None for a value.
        channels: names of the channels.
        series: (n_i, c).
        shares: (n_i, c); they sum to the difference between the answer (the logarithm of the class's
            probability, or the value) and that of the mean of the training data.
    """

    case: str
    prediction: str
    probability: float | None
    channels: tuple[str, ...]
    series: np.ndarray
    shares: np.ndarray


def explain_run(run: SavedRun, file: Path, case: str | None, seed: int | None, nodes: int) -> Explanation:
    """Explain the prediction of a run on time series for a case of a file (by default the first).

    Raises:
        InputError: for a run of another task, a file that does not fit it, and a case that is not there.
    """
    if not isinstance(run.recipe, Recipe):
        raise InputError(f"run {run.folder}: task {run.recipe.task_name} has no series to explain")
    found = fitting_file(file, run.recipe, run.facts, reads_target=False)
    place = _find(found, case, file)
    model, series = run.model(seed), found.sequences[place]
    (output,) = predict_outputs(model, [series], precision=run.recipe.precision)
    names = run.facts["class_names"]
    shares = integrated_gradients([(model, 1.0)], series, _answer(output, bool(names)), nodes)
    if not names:
        return _explanation(found, place, f"{output.item():.6g}", None, shares)
    probabilities = output.double().softmax(dim=-1)
    best = int(probabilities.argmax())
    return _explanation(found, place, names[best], float(probabilities[best]), shares)


def explain_estimator(
    path: Path, file: Path, case: str | None, nodes: int, columns: SeriesColumns
) -> Explanation:
    """Explain the prediction of an estimator in a file of its ``save``, as ``explain_run``."""
    estimator = read_estimator(path)
    found = read_fitting(estimator, path, file, columns)
    place = _find(found, case, file)
    X = [found.sequences[place].T]
    shares = np.asarray(estimator.feature_importance(X, nodes)[0]).T
    if not hasattr(estimator, "classes_"):
        return _explanation(found, place, f"{estimator.predict(X).ravel()[0]:.6g}", None, shares)
    probabilities = estimator.predict_proba(X)[0]
    best = int(probabilities.argmax())
    return _explanation(found, place, str(estimator.classes_[best]), float(probabilities[best]), shares)


def _explanation(
    file: SeriesFile, place: int, prediction: str, probability: float | None, shares: np.ndarray
) -> Explanation:
    series = file.sequences[place]
    case = str(place) if file.cases is None else file.cases[place]
    names = file.channels or []
    if len(names) != series.shape[1] or not all(names):
        names = [f"channel {index}" for index in range(series.shape[1])]
    return Explanation(case, prediction, probability, tuple(names), series, shares)


def _answer(output: Tensor, is_class: bool) -> Callable[[Tensor], Tensor]:
    best = int(output.argmax()) if is_class else 0
    if is_class:
        return lambda outputs: outputs.log_softmax(dim=-1)[:, best]
    return lambda outputs: outputs[:, best]


def _find(file: SeriesFile, case: str | None, path: Path) -> int:
    """The place of a case by its name, or by its number where cases have no names."""
    if case is None:
        return 0
    names = [str(index) for index in range(len(file.sequences))] if file.cases is None else file.cases
    if case not in names:
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise InputError(f"case {case!r} is not in {path} (it has: {shown})")
    return names.index(case)


def read_estimator(path: Path) -> Any:
    """The estimator in a file, of the class that the file names.

    Raises:
        InputError: for a file that holds none.
    """
    try:
        kind = json.loads(read_metadata(path)["estimator"])["class"]
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: holds no estimator of kernel-attention") from None
    return (AttentionRegressor if kind == "AttentionRegressor" else AttentionClassifier).load(path)


def read_fitting(estimator: Any, path: Path, file: Path, columns: SeriesColumns) -> SeriesFile:
    """The series of a file, with the channels in the order of the training data where these have names.

    Args:
        estimator: of ``read_estimator``.
        path: its file, for messages.
        file: the series; their targets are not read.
        columns: what the columns of a table hold.
    """
    found = read_series_file(file, estimator.missing, dataclasses.replace(columns, reads_target=False))
    names = getattr(estimator, "feature_names_in_", None)
    channels = found.sequences[0].shape[1]
    if names is None and channels != estimator.n_features_in_:
        raise InputError(f"{file}: has {channels} channels, {path} takes {estimator.n_features_in_}")
    return order_channels(found, None if names is None else list(names), str(file), str(path))


def predict_file(path: Path, file: Path, columns: SeriesColumns) -> list[dict[str, Any]]:
    """A row for every case of a file: its name, the prediction, and the probability of every class."""
    estimator = read_estimator(path)
    found = read_fitting(estimator, path, file, columns)
    X = [sequence.T for sequence in found.sequences]
    cases: list[Any] = list(range(len(X))) if found.cases is None else list(found.cases)
    if not hasattr(estimator, "classes_"):
        values = np.asarray(estimator.predict(X)).tolist()
        return [{"case": case, "prediction": value} for case, value in zip(cases, values, strict=True)]
    classes, probabilities = estimator.classes_.tolist(), estimator.predict_proba(X)
    best = probabilities.argmax(axis=1)
    return [
        {"case": case, "prediction": classes[place]}
        | {f"probability_{name}": value for name, value in zip(classes, row, strict=True)}
        for case, place, row in zip(cases, best.tolist(), probabilities.tolist(), strict=True)
    ]
