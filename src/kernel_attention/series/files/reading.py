"""Series in files: `.ts`, tables with a step or a case a row, arrays of NumPy."""

from __future__ import annotations

import io
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np

from kernel_attention.errors import InputError, unknown
from kernel_attention.limits import require_memory
from kernel_attention.series.files.layouts import SeriesColumns, read_series_table, require_target
from kernel_attention.series.files.order_keys import as_number
from kernel_attention.series.files.tables import TABLES
from kernel_attention.series.files.ts_format import read_ts
from kernel_attention.series.sequences import checked_sequences, unresolved_sequences

SERIES_FILES = (".ts", ".npy", ".npz", *TABLES)
_LAYOUTS = ("auto", "long", "wide")
_WHOLE = re.compile(r"-?(0|[1-9]\d{0,17})")


@dataclass(frozen=True, eq=False)
class SeriesFile:
    """The contents of one file of series; ``X`` and ``y`` are what ``AttentionClassifier.fit`` takes.

    Attributes:
        sequences: the series of every case, (n_i, c), float32 or float64 as the file needs; NaN at gaps.
        labels: (cases,) as the file has them: text, or numbers; None without any.
        task: "classification" or "regression" where a `.ts` file says which.
        cases: the names of the cases, where the file has them.
        channels: the names of the channels, where the file has them; "" for one whose columns are steps.
        declares_gaps: whether a `.ts` file says in its header that values are missing.
    """

    sequences: list[np.ndarray]
    labels: np.ndarray | None
    task: str | None = None
    cases: list[str] | None = None
    channels: list[str] | None = None
    declares_gaps: bool = False

    @cached_property
    def X(self) -> np.ndarray | list[np.ndarray]:
        """The series as (cases, c, n), or a list of (c, n_i) where their lengths differ."""
        series = [sequence.T for sequence in self.sequences]
        return np.stack(series) if len({len(sequence) for sequence in self.sequences}) == 1 else series

    @cached_property
    def y(self) -> np.ndarray | None:
        """The labels, (cases,): int64 or float64 where all are numbers, else text; None without any.

        Numbers that lose digits as such, as the codes 01 and 02, stay text.
        """
        if self.labels is None or self.labels.dtype.kind not in "US":
            return self.labels
        texts = self.labels.tolist()
        if all(map(_WHOLE.fullmatch, texts)):
            return self.labels.astype(np.int64)
        is_value = not all(text.lstrip("+-").isdecimal() for text in texts)
        is_value = is_value and all(as_number(text) is not None for text in texts)
        return self.labels.astype(np.float64) if is_value else self.labels


def read_series(
    path: str | os.PathLike[str],
    *,
    layout: Literal["auto", "long", "wide"] = "auto",
    case_column: str = "",
    time_column: str = "",
    target_column: str | None = None,
    channel_columns: Sequence[str] | None = None,
    reads_target: bool = True,
) -> SeriesFile:
    """Read labelled or unlabelled series from a file.

    Gaps are NaN: ``AttentionClassifier(missing="interpolate")`` fills them, also in what it predicts.

    Args:
        path: a table (`.csv`, `.tsv`, or `.parquet`, which needs the extra ``parquet``), a file of the time
            series archive (`.ts`), or arrays: `.npy`, and `.npz` with `X`, (cases, channels, time), and `y`.
            With an array `lengths`, the `X` of an `.npz` has the steps of all cases one after the other,
            (steps, channels).
        layout: of a table: "long", a step of a case a row; "wide", a case a row, whose steps are columns
            (`x_0`, `x_1`, ..., or dates); "auto": long where ``time_column`` is given.
        case_column: the column that names the case of a row; a long table needs it.
        time_column: the column of numbers or dates that orders the steps of a long table; without it they
            are in the order of the rows.
        target_column: the column of the label or the value to predict; None: the one named target, if any.
        channel_columns: the columns of the channels of a long table, or the names before the steps in a wide
            one; None: all other columns. The ``channels`` of a first file read a second one in their order.
        reads_target: without it ``y`` is None, and the target's column is neither read nor a channel.

    Returns:
        The contents, as ``X`` and ``y``, with the names of cases and channels.

    Raises:
        InputError: for everything that is wrong with the file, with its line or row and column.

    >>> import kernel_attention as ka
    >>> text = "who,t,left,right,kind|a,0,1,2,slow|a,1,3,4,slow|b,0,5,6,fast|b,1,,8,fast"
    >>> _ = Path("walks.csv").write_text(text.replace("|", chr(10)))
    >>> walks = ka.read_series("walks.csv", case_column="who", time_column="t", target_column="kind")
    >>> walks.X.shape, walks.y.tolist(), walks.channels, walks.cases
    ((2, 2, 2), ['slow', 'fast'], ['left', 'right'], ['a', 'b'])
    >>> walks.X[1].tolist()
    [[5.0, nan], [6.0, 8.0]]
    """
    if layout not in _LAYOUTS:
        raise unknown("layout", layout, _LAYOUTS)
    if isinstance(channel_columns, str):
        raise InputError(f"channel_columns={channel_columns!r} must be a list of names, not one text")
    columns = SeriesColumns(
        layout,
        case_column,
        time_column,
        "target" if target_column is None else target_column,
        [name for name in channel_columns or () if name],
        reads_target,
    )
    path = Path(path)
    if target_column is not None and reads_target and path.is_file():
        require_target(path, columns)
    return read_contents(path, columns)


def read_contents(path: str | os.PathLike[str], columns: SeriesColumns) -> SeriesFile:
    """The contents of a file as ``read_series``; ``columns`` says what those of a table hold."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"file {str(path)!r} " + ("is not a file" if path.exists() else "does not exist"))
    if path.suffix == ".ts":
        return _read_archive_file(path)
    if path.suffix in TABLES:
        table = read_series_table(path, columns)
        labels = None if table.labels is None else np.array(table.labels)
        sequences = checked_sequences(table.sequences, str(path))
        return SeriesFile(sequences, labels, cases=table.cases, channels=table.channels)
    if path.suffix not in (".npy", ".npz"):
        accepted = ", ".join(SERIES_FILES)
        raise InputError(f"{path}: unknown type of file {path.suffix!r} (accepted: {accepted})")
    X, labels = _read_numpy(path)
    try:
        sequences = unresolved_sequences(X)
    except InputError as error:
        raise InputError(f"{path}: {error}") from None
    if labels is not None and labels.shape != (len(sequences),):
        raise InputError(f"{path}: y has shape {labels.shape}, accepted: ({len(sequences)},), the cases of X")
    return SeriesFile(checked_sequences(sequences, str(path)), labels)


def _read_archive_file(path: Path) -> SeriesFile:
    with reading_text(str(path)), path.open(encoding="utf-8-sig") as text:
        file = read_ts(text, str(path))
    if not file.sequences:
        raise InputError(f"{path} is empty: no case after @data")
    labels = np.array(file.labels) if file.header.task else None
    sequences = checked_sequences(file.sequences, str(path))
    return SeriesFile(sequences, labels, file.header.task, declares_gaps=file.header.missing)


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


@contextmanager
def reading_text(source: str) -> Iterator[None]:
    """Inside the block what cannot be read of a text or a zip file becomes an InputError."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise InputError(f"{source} is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise InputError(f"{source} is not a readable zip file ({error})") from None
    except OSError as error:
        raise InputError(f"cannot read {source}: {error.strerror or error}") from None
