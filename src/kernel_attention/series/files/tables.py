"""Columns of a CSV or Parquet file, with the line or row in every error."""

from __future__ import annotations

import csv
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kernel_attention.containers import is_missing
from kernel_attention.errors import InputError, missing_package, unknown
from kernel_attention.series.sequences import LARGEST

TABLES = (".csv", ".tsv", ".parquet")

_DELIMITERS = ",;\t"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE)
_INDEX = re.compile(r"__index_level_\d+__")


class ColumnTable(NamedTuple):
    """Some columns of a file.

    source: the file, for messages.
    cells: the texts of the columns that were asked for as they are; None where a cell is missing.
    values: (rows, columns) float64 of those that were asked for as numbers; NaN where a cell is empty.
    lines: the line of every row in the file; empty where rows have no lines.
    """

    source: str
    cells: dict[str, list[str | None]]
    values: np.ndarray
    lines: list[int]

    def where(self, row: int) -> str:
        """The place of a row, for messages."""
        return _place(self.source, row, self.lines)


def column_names(path: Path) -> list[str]:
    """The names of the columns; InputError where a name stands twice or the file cannot be read."""
    if path.suffix == ".parquet":
        names = [str(name) for name in _parquet(path).schema_arrow.names]
    else:
        with _csv(path) as (names, _):
            pass
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InputError(f"{path}: two columns are named {name!r}")
        seen.add(name)
    return names


def is_index(name: str) -> bool:
    """Return whether a column is the index of a frame as pandas writes it where it has no name."""
    return not name or _INDEX.fullmatch(name) is not None


def listed(names: Sequence[str]) -> str:
    """Names for a message; the first 24 of many."""
    return ", ".join(names[:24]) + (", ..." if len(names) > 24 else "")


def read_table(path: Path, plain: Sequence[str], numeric: Sequence[str]) -> ColumnTable:
    """Columns of a file by their names.

    Raises:
        InputError: for a column that the file does not have, a row of another number of cells, a cell of
            ``numeric`` that is no number or beyond float32, a file that cannot be read, and one without rows.
    """
    names = column_names(path)
    known = set(names)
    for name in (*plain, *numeric):
        if name not in known:
            raise unknown(f"column of {path}", name, names, listing="see its first line")
    table = (_read_parquet if path.suffix == ".parquet" else _read_csv)(path, plain, numeric)
    if not len(table.values):
        raise InputError(f"{path}: has no rows below the names of its columns")
    infinite = np.abs(table.values) > LARGEST
    if infinite.any():
        row, column = np.argwhere(infinite)[0]
        raise InputError(
            f"{table.where(row)}: infinite value {table.values[row, column]:g} in column {numeric[column]!r} "
            "(float32 is used)"
        )
    return table


@contextmanager
def _csv(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """(names of the columns, (line, cells) of every row) of a CSV file."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            if not head.strip():
                raise InputError(f"{path}: the first line must name the columns, it is empty")
            delimiter = max(_DELIMITERS, key=head.count)
            file.seek(0)
            reader = csv.reader(file, delimiter=delimiter, strict=True)
            names = [name.strip() for name in next(reader)]
            yield names, _rows(path, reader, len(names))
    except UnicodeDecodeError as error:
        raise InputError(f"{path} is not text in UTF-8 ({error.reason} at byte {error.start})") from None
    except csv.Error as error:
        raise InputError(f"{path}, line {reader.line_num}: {error}") from None
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror or error}") from None


def _rows(path: Path, reader: Any, width: int) -> Iterator[tuple[int, list[str]]]:
    for cells in reader:
        if not cells:
            continue  # an empty line
        if len(cells) != width:
            raise InputError(
                f"{path}, line {reader.line_num}: {len(cells)} cells, the first line names {width} columns"
            )
        yield reader.line_num, cells


def _read_csv(path: Path, plain: Sequence[str], numeric: Sequence[str]) -> ColumnTable:
    cells: dict[str, list[str | None]] = {name: [] for name in plain}
    lines: list[int] = []
    values = array("d")  # a list of Python's numbers would take four times the memory
    with _csv(path) as (names, rows):
        place_of = {name: place for place, name in enumerate(names)}
        kept = [(place_of[name], cells[name]) for name in plain]
        places = [place_of[name] for name in numeric]
        for line, row in rows:
            for place, column in kept:
                column.append(_text(row[place]))
            values.extend(_numbers([row[place] for place in places], numeric, f"{path}, line {line}"))
            lines.append(line)
    return ColumnTable(str(path), cells, np.array(values).reshape(len(lines), len(numeric)), lines)


def _text(value: Any) -> str | None:
    text = str(value).strip()  # of None too
    return None if is_missing(text) else text


def _numbers(cells: list[str], names: Sequence[str], where: str) -> list[float]:
    try:
        if not any("_" in cell for cell in cells):  # which Python reads as no character at all
            return [float(cell) for cell in cells]
    except ValueError:
        pass
    found = []
    for cell, name in zip(cells, names, strict=True):
        text = cell.strip()
        is_gap = is_missing(text)
        if not is_gap and not _NUMBER.fullmatch(text):
            shown = repr(text if len(text) <= 30 else text[:30] + "...")
            raise InputError(f"{where}: {shown} in column {name!r} is not a number")
        found.append(np.nan if is_gap else float(text))
    return found


def _parquet(path: Path) -> Any:
    try:
        import pyarrow
        from pyarrow.parquet import ParquetFile
    except ModuleNotFoundError as error:
        raise InputError(missing_package(error, str(path)) or str(error)) from None
    try:
        return ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} is not a readable Parquet file ({' '.join(str(error).split())})") from None


def _read_parquet(path: Path, plain: Sequence[str], numeric: Sequence[str]) -> ColumnTable:
    import pyarrow

    try:
        table = _parquet(path).read(columns=[*plain, *numeric])
        cells = {name: _parquet_texts(table[name]) for name in plain}
        values = np.empty((table.num_rows, len(numeric)))
        for index, name in enumerate(numeric):
            values[:, index] = _parquet_numbers(table[name], f"{path}: column {name!r}")
    except InputError:
        raise
    except (OSError, ValueError, OverflowError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} is not a readable Parquet file ({' '.join(str(error).split())})") from None
    return ColumnTable(str(path), cells, values, [])


def _parquet_texts(column: Any) -> list[str | None]:
    """The cells of a column as text; times in ISO 8601 with all of their digits."""
    from pyarrow import int64, string, timestamp, types

    column = _without_dictionary(column)
    kind = column.type
    if types.is_duration(kind):
        column = column.cast(int64())
    if not types.is_timestamp(kind) and not types.is_time(kind):
        return [_text(cell) for cell in column.to_pylist()]
    if types.is_timestamp(kind):
        column = column.cast(timestamp(kind.unit))  # without its zone: the stored time is that of UTC
    end = "+00:00" if types.is_timestamp(kind) and kind.tz else ""
    texts = column.cast(string()).to_pylist()
    return [None if text is None else _shortest(text) + end for text in texts]


def _shortest(text: str) -> str:
    """A time without the zeros at the end of its fraction."""
    return text.rstrip("0").removesuffix(".") if "." in text else text


def _parquet_numbers(column: Any, where: str) -> np.ndarray:
    """A column as float64, rounded as the numbers of a CSV file are; NaN where a cell is missing."""
    from pyarrow import float64, types

    column = _without_dictionary(column)
    kind = column.type
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_decimal, types.is_null)
    if not any(test(kind) for test in tests):
        raise InputError(f"{where} holds {kind}, not numbers")
    return np.asarray(column.cast(float64(), safe=False).to_numpy())


def _without_dictionary(column: Any) -> Any:
    from pyarrow import types

    return column.cast(column.type.value_type) if types.is_dictionary(column.type) else column


def _place(source: str, row: int, lines: list[int]) -> str:
    return f"{source}, line {lines[row]}" if lines else f"{source}, row {row + 1}"
