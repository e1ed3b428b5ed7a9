"""A data set of one's own: a file of labelled series, and perhaps a second one for the test."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.archive import resolve_root
from kernel_attention.experiments.data.series.loading import SeriesFile, read_series_file
from kernel_attention.experiments.data.series.series_tables import SeriesColumns
from kernel_attention.experiments.data.series.tables import TABLES
from kernel_attention.experiments.data.series.time_series import (
    SequenceSplit,
    TimeSeriesData,
    stratified_split,
)
from kernel_attention.experiments.notes import note_once

TargetType = Literal["auto", "class", "value"]

_SPLIT_SEED = 0


def is_series_file(dataset: str) -> bool:
    """Whether a data set is named by a file instead of a name of the archive."""
    return Path(dataset).suffix in (".ts", ".npy", ".npz", *TABLES)


def load_series_files(
    dataset: str,
    data_root: str | os.PathLike[str] | None = None,
    missing: str = "auto",
    *,
    columns: SeriesColumns | None = None,
    test_file: str = "",
    test_fraction: float = 0.2,
    target_type: TargetType = "auto",
) -> TimeSeriesData:
    """Labelled series of a file as a data set.

    dataset: the file, below the data root or in the working folder; see `read_series_file`.
    missing: "auto", "interpolate" or "error", see `resolve_missing`.
    columns: what the columns of a table hold.
    test_file: the file of the test split; without it a stratified part of the cases, drawn with seed 0.
    test_fraction: this part.
    target_type: whether the targets are classes or values. "auto": what a `.ts` file says; else values where
        all of them are numbers and one is not whole.

    Raises InputError for everything that is wrong with the files or their contents.
    """
    file = read_series_file(_find(dataset, data_root), missing, columns)
    labels = _labels(file, dataset, columns)
    is_values = target_type == "value" or (target_type == "auto" and _has_values(file, labels))
    task = "regression" if is_values else "classification"
    names = () if is_values else _class_names(labels)
    if len(names) == 1:
        raise InputError(
            f"{dataset}: all {len(labels)} cases have the label {names[0]!r}; 2 classes are needed"
        )
    split = SequenceSplit(file.sequences, _targets(labels, names, dataset))
    if not test_file:
        try:
            train, test = stratified_split(split, test_fraction, _SPLIT_SEED, task)
        except InputError as error:
            raise InputError(
                f"{dataset}: {error}; name a test_file, or give target_type: value if the targets are values"
            ) from None
        note_once(
            f"{dataset}: {len(test)} of its {len(split)} cases, drawn with seed 0, are the test split "
            "(test_file names another one)"
        )
    else:
        other = read_series_file(_find(test_file, data_root), missing, columns)
        channels = [found.sequences[0].shape[1] for found in (file, other)]
        if channels[0] != channels[1]:
            raise InputError(f"{dataset} has {channels[0]} channels, {test_file} has {channels[1]}")
        targets = _targets(_labels(other, test_file, columns), names, test_file)
        train, test = split, SequenceSplit(other.sequences, targets)
    return TimeSeriesData(dataset, task, train, test, names)


def _find(name: str, data_root: str | os.PathLike[str] | None) -> Path:
    root = resolve_root(data_root)
    places = [Path(name).expanduser(), *([] if root is None else [root / name])]
    found = next((place for place in reversed(places) if place.is_file()), None)
    if found is None:
        raise InputError(f"dataset {name!r}: there is no file {' or '.join(map(str, places))}")
    return found


def _labels(file: SeriesFile, name: str, columns: SeriesColumns | None) -> list[str]:
    if file.labels is None:
        is_table = Path(name).suffix in TABLES
        target = (columns or SeriesColumns()).target
        raise InputError(
            f"{name}: has no labels to learn"
            + (f": no column {target!r}; name the column with target_column" if is_table else "")
        )
    return [str(label) for label in file.labels.tolist()]


def _number(label: str) -> float:
    try:
        return float(label)
    except ValueError:
        return math.nan


def _has_values(file: SeriesFile, labels: list[str]) -> bool:
    if file.task is not None:
        return file.task == "regression"
    numbers = [_number(label) for label in labels]
    return all(map(math.isfinite, numbers)) and not all(map(float.is_integer, numbers))


def _class_names(labels: list[str]) -> tuple[str, ...]:
    """The classes, in the order of their names; numbers in that of their size."""
    names = sorted(set(labels))
    numbers = {name: _number(name) for name in names}
    is_numeric = not any(map(math.isnan, numbers.values()))
    return tuple(sorted(names, key=numbers.__getitem__) if is_numeric else names)


def _targets(labels: list[str], names: tuple[str, ...], where: str) -> np.ndarray:
    """Class indices, or values where there are no names."""
    if names:
        unseen = sorted(set(labels) - set(names))
        if unseen:
            raise InputError(
                f"{where}: labels {', '.join(unseen)} were not seen in training (seen: {', '.join(names)})"
            )
        index = {name: k for k, name in enumerate(names)}
        return np.array([index[label] for label in labels], dtype=np.int64)
    values = np.array([_number(label) for label in labels])
    if not np.isfinite(values).all():
        case = int(np.flatnonzero(~np.isfinite(values))[0])
        raise InputError(f"{where}: the target {labels[case]!r} of case {case} is not a finite number")
    return values.astype(np.float32)
