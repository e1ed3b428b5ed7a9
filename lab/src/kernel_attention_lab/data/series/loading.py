"""A data set by name, or sequences from one file."""

from __future__ import annotations

import io
import math
import os
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, NamedTuple, TextIO

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.memory_limit import require_memory
from kernel_attention.series import SequenceSplit, as_sequences
from kernel_attention.series.sequences import check_missing, resolve_missing
from kernel_attention_lab.data.archive import Location, locate
from kernel_attention_lab.data.series.series_tables import SeriesColumns, read_series_table
from kernel_attention_lab.data.series.tables import TABLES
from kernel_attention_lab.data.series.time_series import TimeSeriesData
from kernel_attention_lab.data.series.ts_format import TsFile, read_ts

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


class SeriesFile(NamedTuple):
    """The contents of one file.

    sequences: (n_i, c), float32 or float64 as the file has them.
    labels: (cases,) str or numbers; None where the file has none.
    task: "classification" or "regression" where the file says which.
    cases: the names of the cases, where the file has them.
    channels: the names of the channels, where the file has them.
    """

    sequences: list[np.ndarray]
    labels: np.ndarray | None
    task: str | None = None
    cases: list[str] | None = None
    channels: list[str] | None = None


def read_sequences(
    path: str | os.PathLike[str], missing: str = "auto"
) -> tuple[list[np.ndarray], np.ndarray | None]:
    """Sequences of one file, and their labels if it has any; see `read_series_file`."""
    found = read_series_file(path, missing)
    return found.sequences, found.labels


def read_series_file(
    path: str | os.PathLike[str], missing: str = "auto", columns: SeriesColumns | None = None
) -> SeriesFile:
    """Sequences of one file, and their labels if it has any.

    path: `.ts` (labels as its header says); `.npy` (array in aeon's shape); `.npz` (array `X`, optional `y`;
        with an array `lengths`, X has the steps of all cases one after the other, (steps, channels)); `.csv`,
        `.tsv` and `.parquet` (tables).
    missing: "auto", "interpolate" or "error", see `resolve_missing`.
    columns: what the columns of a table hold.

    Raises InputError for everything that is wrong with the file or its contents.
    """
    check_missing(missing)
    path = Path(path)
    if not path.is_file():
        raise InputError(f"file {str(path)!r} " + ("is not a file" if path.exists() else "does not exist"))
    if path.suffix == ".ts":
        with _reading(str(path)), path.open(encoding="utf-8-sig") as text:
            file = read_ts(text, str(path))
        if not file.sequences:
            raise InputError(f"{path} is empty: no case after @data")
        sequences = resolve_missing(
            file.sequences, missing, str(path), declared=file.header.missing, advice=_ADVICE
        )
        labels = np.array(file.labels) if file.header.task else None
        return SeriesFile(sequences, labels, file.header.task)
    if path.suffix in TABLES:
        table = read_series_table(path, columns or SeriesColumns())
        sequences = resolve_missing(table.sequences, missing, str(path), advice=_ADVICE)
        labels = None if table.labels is None else np.array(table.labels)
        return SeriesFile(sequences, labels, cases=table.cases, channels=table.channels)
    if path.suffix in (".npy", ".npz"):
        X, labels = _read_numpy(path)
        try:
            sequences = as_sequences(X, missing, _ADVICE)
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if labels is not None and labels.shape != (len(sequences),):
            raise InputError(
                f"{path}: y has shape {labels.shape}, accepted: ({len(sequences)},), the cases of X"
            )
        return SeriesFile(sequences, labels)
    accepted = ", ".join((".ts", ".npy", ".npz", *TABLES))
    raise InputError(f"{path}: unknown type of file {path.suffix!r} (accepted: {accepted})")


def _read_numpy(path: Path) -> tuple[Any, np.ndarray | None]:
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                return _read_array(file, path.stat().st_size, str(path)), None
        with zipfile.ZipFile(path) as archive:
            sizes = {entry.filename.removesuffix(".npy"): entry.file_size for entry in archive.infolist()}
            if "X" not in sizes:
                raise InputError(f"{path} has no array 'X' (it has: {', '.join(sizes) or 'nothing'})")
            arrays = {}
            for name in {"X", "y", "lengths"} & set(sizes):
                with archive.open(f"{name}.npy") as file:
                    arrays[name] = _read_array(file, sizes[name], f"array {name!r} of {path}")
            X = arrays["X"] if "lengths" not in arrays else _cut(path, arrays["X"], arrays["lengths"])
            return X, arrays.get("y")
    except InputError:
        raise
    except Exception as error:  # a damaged archive can raise anything
        raise InputError(
            f"{path} is not a readable {path.suffix} file ({error or type(error).__name__})"
        ) from None


def _cut(path: Path, X: np.ndarray, lengths: np.ndarray) -> list[np.ndarray]:
    """The cases (channels, time) of an array (steps, channels)."""
    is_right = X.ndim == 2 and lengths.ndim == 1 and lengths.dtype.kind in "iu" and len(lengths) > 0
    if not is_right or (lengths < 1).any() or lengths.sum() != len(X):
        raise InputError(
            f"{path}: with lengths, X must have shape (steps, channels) and lengths must be whole "
            f"numbers above 0 that sum to its steps; X has shape {X.shape}, lengths {lengths.shape} of "
            f"{lengths.dtype}" + (f" with sum {lengths.sum()}" if lengths.dtype.kind in "iuf" else "")
        )
    return [case.T for case in np.split(X, lengths.cumsum()[:-1])]


def _read_array(file: IO[bytes], size: int, where: str) -> np.ndarray:
    """The array in ``size`` bytes of NumPy's format; its header is checked against the size."""
    require_memory(where, size, "read it in parts")
    content = io.BytesIO(file.read(size))
    version = np.lib.format.read_magic(content)
    reader = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = reader(content)
    claimed, found = math.prod(shape) * dtype.itemsize, size - content.tell()
    if claimed > found:
        raise InputError(
            f"{where}: its header says shape {shape} of {dtype}, {claimed} bytes; it has {found}"
        )
    content.seek(0)
    return np.lib.format.read_array(content, allow_pickle=False)  # a data file must never run code


def _read_both(location: Location) -> tuple[TsFile, TsFile]:
    if location.zip_path is None:
        files = []
        for path in (location.train, location.test):
            with _reading(str(path)), path.open(encoding="utf-8-sig") as text:
                files.append(read_ts(text, str(path)))
    else:
        with _reading(str(location.zip_path)), zipfile.ZipFile(location.zip_path) as archive:
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


@contextmanager
def _reading(source: str) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{source} is not a readable zip file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from None
