"""A data set by name, or sequences from one file."""

from __future__ import annotations

import io
import os
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import TextIO

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.series import SequenceSplit
from kernel_attention.series.files import SeriesColumns, SeriesFile
from kernel_attention.series.files.reading import read_contents, reading_text
from kernel_attention.series.files.ts_format import TsFile, read_ts
from kernel_attention.series.sequences import check_missing, resolve_missing
from kernel_attention_lab.data.archive import Location, locate
from kernel_attention_lab.data.series.time_series import TimeSeriesData

_ADVICE = (
    "fill such gaps in the file, or let a model learn with them: missing: interpolate in its recipe "
    "(--missing interpolate of init and train) fills them here and in every file to predict"
)


def load_time_series(
    name: str, data_root: str | os.PathLike[str] | None = None, missing: str = "auto"
) -> TimeSeriesData:
    """Load both splits of an aeon classification or regression set.

    name: looked up as `<root>/<Name>/<Name>_TRAIN.ts`, `<root>/<Name>_TRAIN.ts` and `<root>/<Name>.zip`, the
        same under `<root>/uea`, among the sets bundled with aeon, in the cache, and then by aeon's download
        into the root (or ~/.cache/kernel-attention). The archive's variants `<Name>_eq` and `<Name>_nmv` are
        names too.
    data_root: a folder; by default that of the environment variable KERNEL_ATTENTION_DATA, if set.
    missing: "auto", "interpolate" or "error", see `resolve_missing`.

    Class names are the labels of the training split in sorted order, in lower case as aeon gives them.
    Raises InputError for everything that is wrong with the name, the files or their contents.
    """
    check_missing(missing)
    location = locate(name, data_root)
    train, test = _read_both(location)
    for file, part in ((train, "train"), (test, "test")):
        if file.header.task is None:
            raise InputError(f"the {part} split of {name} has neither @classLabel true nor @targetLabel true")
        if not file.sequences:
            raise InputError(f"the {part} split of {name} is empty: its file has no case after @data")
    if train.header.task != test.header.task:
        raise InputError(
            f"the train split of {name} is {train.header.task}, the test split {test.header.task}"
        )
    channels = [file.sequences[0].shape[1] for file in (train, test)]
    if channels[0] != channels[1]:
        raise InputError(
            f"the train split of {name} has {channels[0]} channels, the test split {channels[1]}"
        )

    declared = train.header.missing or test.header.missing
    sequences = [
        resolve_missing(file.sequences, missing, f"the {part} split of {name}", declared=declared)
        for file, part in ((train, "train"), (test, "test"))
    ]
    if train.header.task == "regression":
        targets = [np.array(file.labels, dtype=np.float32) for file in (train, test)]
        class_names: tuple[str, ...] = ()
    else:
        class_names = tuple(sorted(str(label) for label in set(train.labels)))
        targets = [_indices(file, class_names, name) for file in (train, test)]
    splits = [SequenceSplit(*pair) for pair in zip(sequences, targets, strict=True)]
    return TimeSeriesData(name, str(train.header.task), splits[0], splits[1], class_names)


def _indices(file: TsFile, class_names: tuple[str, ...], name: str) -> np.ndarray:
    unseen = sorted(str(label) for label in set(file.labels) - set(class_names))
    if unseen:
        raise InputError(
            f"the test split of {name} has labels unseen in training: {', '.join(unseen)} "
            f"(seen: {', '.join(class_names)})"
        )
    index = {label: k for k, label in enumerate(class_names)}
    return np.array([index[str(label)] for label in file.labels], dtype=np.int64)


def read_sequences(
    path: str | os.PathLike[str], missing: str = "auto"
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Sequences of one file, and their labels if it has any; see `read_series_file`."""
    found = read_series_file(path, missing)
    return found.sequences, found.labels


def read_series_file(
    path: str | os.PathLike[str], missing: str = "auto", columns: SeriesColumns | None = None
) -> SeriesFile:
    """Sequences of one file without a gap, and their labels if it has any; see ``read_series``.

    missing: "auto", "interpolate" or "error", see `resolve_missing`.
    columns: what the columns of a table hold.

    Raises InputError for everything that is wrong with the file or its contents.
    """
    check_missing(missing)
    file = read_contents(path, columns or SeriesColumns())
    sequences = resolve_missing(
        file.sequences, missing, str(path), declared=file.declares_gaps, advice=_ADVICE
    )
    return replace(file, sequences=sequences)


def _read_both(location: Location) -> tuple[TsFile, TsFile]:
    if location.zip_path is None:
        files = []
        for path in (location.train, location.test):
            with reading_text(str(path)), path.open(encoding="utf-8-sig") as text:
                files.append(read_ts(text, str(path)))
    else:
        with reading_text(str(location.zip_path)), zipfile.ZipFile(location.zip_path) as archive:
            files = [
                _read_member(archive, path.name, location.zip_path)
                for path in (location.train, location.test)
            ]
    return files[0], files[1]


def _read_member(archive: zipfile.ZipFile, file: str, zip_path: Path) -> TsFile:
    members = [member for member in archive.namelist() if member.rpartition("/")[2] == file]
    if not members:
        raise InputError(
            f"{zip_path} has no {file} (it has: {', '.join(archive.namelist()[:6]) or 'nothing'})"
        )
    with archive.open(members[0]) as raw:
        text: TextIO = io.TextIOWrapper(raw, encoding="utf-8-sig")
        return read_ts(text, f"{zip_path}:{members[0]}")
