"""A data set of one's own: a file of labelled series, and perhaps a second one for the test."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from kernel_attention.containers import is_missing
from kernel_attention.errors import InputError, note_once
from kernel_attention.series import SequenceSplit, stratified_split
from kernel_attention.series.files import SERIES_FILES, SeriesColumns, SeriesFile
from kernel_attention.series.files.layouts import require_target
from kernel_attention.series.files.order_keys import as_number
from kernel_attention.series.files.tables import listed
from kernel_attention_lab.data.archive import resolve_root
from kernel_attention_lab.data.series.loading import read_series_file
from kernel_attention_lab.data.series.time_series import TimeSeriesData

TargetType = Literal["auto", "class", "value"]

_SPLIT_SEED = 0


def is_series_file(dataset: str) -> bool:
    """Return whether a data set is named by a file instead of a name of the archive."""
    return Path(dataset).suffix in SERIES_FILES


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
    path = _find(dataset, data_root)
    require_target(path, columns or SeriesColumns())
    file = read_series_file(path, missing, columns)
    labels = _labels(file, dataset)
    is_values = target_type == "value" or (target_type == "auto" and _has_values(file, labels))
    task = "regression" if is_values else "classification"
    names = () if is_values else _class_names(labels)
    if len(names) == 1:
        raise InputError(
            f"{dataset}: all {len(labels)} cases have the label {names[0]!r}; 2 classes are needed"
        )
    split = SequenceSplit(file.sequences, _targets(labels, names, dataset))
    if is_values:
        _require_resolved(labels, split.targets, dataset)
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
        path = _find(test_file, data_root)
        require_target(path, columns or SeriesColumns())
        other = order_channels(read_series_file(path, missing, columns), file.channels, test_file, dataset)
        channels = [found.sequences[0].shape[1] for found in (file, other)]
        if channels[0] != channels[1]:
            raise InputError(f"{dataset} has {channels[0]} channels, {test_file} has {channels[1]}")
        targets = _targets(_labels(other, test_file), names, test_file)
        train, test = split, SequenceSplit(other.sequences, targets)
    return TimeSeriesData(dataset, task, train, test, names, tuple(file.channels or ()))


def order_channels(file: SeriesFile, names: Sequence[str] | None, where: str, expected: str) -> SeriesFile:
    """The contents of a file with its channels in the order of other data.

    Args:
        file: the contents.
        names: the names of the channels of the other data; None or empty where they have none.
        where: the file, for messages.
        expected: the other data, for messages.

    Raises:
        InputError: where a channel is missing or another one is there.
    """
    if file.channels is None or not names:
        if file.channels is not None:
            note_once(f"{expected} keeps no names of channels; {where} is read as {_listed(file.channels)}")
        elif names is not None and len(names) > 1:
            note_once(f"{where} has no names of channels; it is read as {_listed(names)}, in this order")
        return file
    missing = [name for name in names if name not in file.channels]
    unexpected = [name for name in file.channels if name not in names]
    if missing or unexpected:
        found = [
            f"{what} {_listed(group)}"
            for what, group in (("missing:", missing), ("unexpected:", unexpected))
            if group
        ]
        raise InputError(
            f"{where}: the channels are not those of {expected} ({', '.join(found)}); "
            f"accepted: {_listed(names)}, in any order"
        )
    if list(names) == file.channels:
        return file
    places = [file.channels.index(name) for name in names]
    sequences = [np.ascontiguousarray(sequence[:, places]) for sequence in file.sequences]
    return replace(file, sequences=sequences, channels=list(names))


def _listed(names: Sequence[str]) -> str:
    return listed([repr(name) if name else "columns named by steps alone" for name in names])


def _find(name: str, data_root: str | os.PathLike[str] | None) -> Path:
    root = resolve_root(data_root)
    places = [Path(name).expanduser(), *([] if root is None else [root / name])]
    found = next((place for place in reversed(places) if place.is_file()), None)
    if found is None:
        raise InputError(f"dataset {name!r}: there is no file {' or '.join(map(str, places))}")
    return found


def _labels(file: SeriesFile, name: str) -> list[str]:
    if file.labels is None:
        raise InputError(f"{name}: has no labels to learn")
    return label_texts(file, name)


def label_texts(file: SeriesFile, where: str) -> list[str]:
    """The labels of a file that has them, as text; InputError for a missing one."""
    assert file.labels is not None
    texts = [str(label) for label in file.labels.tolist()]
    for case, text in enumerate(texts):
        # A `.ts` file lists its classes, so that there a class can be called none.
        if file.task is None and is_missing(text):
            raise InputError(f"{where}: the label of case {case} is missing ({text!r})")
    return texts


def target_values(labels: Sequence[str], where: str) -> np.ndarray:
    """Labels as values, float32; InputError for one that is no number or not finite in float32."""
    with np.errstate(over="ignore"):
        values = np.array([_number(label) for label in labels]).astype(np.float32)
    for case in np.flatnonzero(~np.isfinite(values))[:1]:
        raise InputError(
            f"{where}: the target {labels[case]!r} of case {case} is not a finite number (float32 is used)"
        )
    return values


def _require_resolved(labels: Sequence[str], values: np.ndarray, where: str) -> None:
    """InputError where float32 rounds targets by more than a hundredth of their deviation."""
    exact = np.array([_number(label) for label in labels])
    deviation = exact.std()
    if np.abs(values - exact).max() > deviation / 100 > 0:
        raise InputError(
            f"{where}: float32 cannot tell the targets apart (mean {exact.mean():g}, deviation "
            f"{deviation:g}); "
            "subtract a constant, or scale them"
        )


def _number(label: str) -> float:
    """The number that a label is, infinite or not; NaN for another text."""
    if label.lower().lstrip("+-") in ("inf", "infinity"):
        return float(label)
    number = as_number(label)
    return math.nan if number is None else float(number)


def _has_values(file: SeriesFile, labels: list[str]) -> bool:
    if file.task is not None:
        return file.task == "regression"
    numbers = [_number(label) for label in labels]
    return not any(map(math.isnan, numbers)) and not all(map(float.is_integer, numbers))


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
    return target_values(labels, where)
