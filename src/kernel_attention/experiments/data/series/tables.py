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

from kernel_attention.errors import InputError, missing_package, unknown

TABLES = (".csv", ".tsv", ".parquet")

_DELIMITERS = ",;\t"
_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)(e[+-]?\d+)?|[+-]?inf(inity)?", re.IGNORECASE)
_GAPS = ("", "?", "na", "nan", "null", "none")


class ColumnTable(NamedTuple):
    """Some columns of a file.

    source: the file, for messages.
    cells: the cells of the columns that were asked for as they are: text of CSV, values of Parquet.
    values: (rows, columns) float64 of those that were asked for as numbers; NaN where a cell is empty.
    lines: the line of every row in the file; empty where rows have no lines.
    """

    source: str
    cells: dict[str, list[Any]]
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
    twice = next((name for index, name in enumerate(names) if name in names[:index]), None)
    if twice is not None:
        raise InputError(f"{path}: two columns are named {twice!r}")
    return names


def read_table(path: Path, plain: Sequence[str], numeric: Sequence[str]) -> ColumnTable:
    """Columns of a file by their names.

    Raises:
        InputError: for a column that the file does not have, a row of another number of cells, a cell of
            ``numeric`` that is no number, a file that cannot be read, and one without rows.
    """
    names = column_names(path)
    for name in (*plain, *numeric):
        if name not in names:
            raise unknown(f"column of {path}", name, names)
    table = (_read_parquet if path.suffix == ".parquet" else _read_csv)(path, plain, numeric)
    if not len(table.values):
        raise InputError(f"{path}: has no rows below the names of its columns")
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
    cells: dict[str, list[Any]] = {name: [] for name in plain}
    lines: list[int] = []
    values = array("d")  # a list of Python's numbers would take four times the memory
    with _csv(path) as (names, rows):
        kept = [(names.index(name), cells[name]) for name in plain]
        places = [names.index(name) for name in numeric]
        for line, row in rows:
            for place, column in kept:
                column.append(row[place].strip())
            values.extend(_numbers([row[place] for place in places], numeric, f"{path}, line {line}"))
            lines.append(line)
    return ColumnTable(str(path), cells, np.array(values).reshape(len(lines), len(numeric)), lines)


def _numbers(cells: list[str], names: Sequence[str], where: str) -> list[float]:
    try:
        if not any("_" in cell for cell in cells):  # which Python reads as no character at all
            return [float(cell) for cell in cells]
    except ValueError:
        pass
    found = []
    for cell, name in zip(cells, names, strict=True):
        text = cell.strip()
        is_gap = text.lower() in _GAPS
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
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path} is not a readable Parquet file ({' '.join(str(error).split())})") from None
    values = np.empty((table.num_rows, len(numeric)))
    for index, name in enumerate(numeric):
        kind = table.schema.field(name).type
        is_number = pyarrow.types.is_integer(kind) or pyarrow.types.is_floating(kind)
        if not is_number and not pyarrow.types.is_boolean(kind):
            raise InputError(f"{path}: column {name!r} holds {kind}, not numbers")
        values[:, index] = table[name].cast(pyarrow.float64()).to_numpy()
    return ColumnTable(str(path), {name: table[name].to_pylist() for name in plain}, values, [])


def _place(source: str, row: int, lines: list[int]) -> str:
    return f"{source}, line {lines[row]}" if lines else f"{source}, row {row + 1}"
