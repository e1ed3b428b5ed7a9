"""Series in the rows of a table: a step a row (long), or a case a row (wide)."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kernel_attention.errors import InputError, nearest
from kernel_attention.series.files.order_keys import DATES, as_number, orders_agree
from kernel_attention.series.files.step_columns import channel_steps
from kernel_attention.series.files.tables import (
    TABLES,
    ColumnTable,
    column_names,
    is_index,
    listed,
    read_table,
)


@dataclass(frozen=True)
class SeriesColumns:
    """The roles of the columns of a table.

    layout: "long", a step of a case a row; "wide", a case a row, whose steps are columns;
        "auto", long where ``time`` is named.
    case: the column that names the case; needed in a long table.
    time: the column that orders the steps of a long table; without it they are in the order of the rows.
    target: the column of the label or the value to predict. A file to predict may lack it.
    channels: the columns of the channels of a long table, or the names before the steps in a wide one;
        without it all other columns.
    reads_target: without it the target's column is not read, so that its cells may be empty.
    """

    layout: Literal["auto", "long", "wide"] = "auto"
    case: str = ""
    time: str = ""
    target: str = "target"
    channels: Sequence[str] = field(default_factory=list)
    reads_target: bool = True

    @property
    def is_long(self) -> bool:
        """Return whether a row is a step."""
        return self.layout == "long" or (self.layout == "auto" and bool(self.time))


class TableSeries(NamedTuple):
    """Sequences (n_i, c) float64 with NaN at gaps, a label of each, and the names of the cases if given.

    ``channels`` has the name of every channel; "" for the only one of a wide table whose columns are steps.
    """

    sequences: list[np.ndarray]
    labels: list[str] | None
    cases: list[str] | None
    channels: list[str]


def read_series_table(path: Path, columns: SeriesColumns) -> TableSeries:
    """The series of a table; InputError, with the line or row, for what ``columns`` does not describe."""
    names = column_names(path)
    return (_read_long if columns.is_long else _read_wide)(path, names, columns)


def require_target(path: Path, columns: SeriesColumns) -> None:
    """InputError where a table has no column of the targets; the column that has them would be a channel."""
    if path.suffix not in TABLES:
        return
    names = column_names(path)
    if columns.target not in names:
        near = nearest(columns.target, names)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise InputError(
            f"{path}: has no labels to learn: no column {columns.target!r}{hint} (it has: {listed(names)}); "
            "target_column names it (--target_column NAME)"
        )


def _read_long(path: Path, names: list[str], columns: SeriesColumns) -> TableSeries:
    if not columns.case:
        raise InputError(
            f"{path}: a table with a step a row needs case_column, the column that names the case of a row "
            f"(it has: {listed(names)})"
        )
    plain = [columns.case, *([columns.time] if columns.time else [])]
    others = {*plain, columns.target}
    channels = list(columns.channels) or [name for name in names if not is_index(name) and name not in others]
    if not channels:
        raise InputError(f"{path}: no column is left for the channels (it has: {listed(names)})")
    has_labels = columns.target in names and columns.reads_target
    table = read_table(path, [*plain, columns.target] if has_labels else plain, channels)
    rows_of: dict[str, list[int]] = {}
    for row, case in enumerate(_texts(table, columns.case)):
        rows_of.setdefault(case, []).append(row)
    times = _times(table, columns.time) if columns.time else None
    labels = _texts(table, columns.target) if has_labels else None
    sequences = []
    for case, rows in rows_of.items():
        if times is not None:
            rows.sort(key=times.__getitem__)
            for first, second in itertools.pairwise(rows):
                if times[first] == times[second]:
                    raise InputError(
                        f"{table.where(second)}: case {case!r} has the time "
                        f"{table.cells[columns.time][second]} twice"
                    )
        if labels is not None:
            other = next((row for row in rows if labels[row] != labels[rows[0]]), None)
            if other is not None:
                raise InputError(
                    f"{table.where(other)}: case {case!r} has the {columns.target} {labels[other]!r} here "
                    f"and {labels[rows[0]]!r} before; a case has one"
                )
        sequences.append(table.values[rows])
    found = None if labels is None else [labels[rows[0]] for rows in rows_of.values()]
    return TableSeries(sequences, found, list(rows_of), channels)


def _read_wide(path: Path, names: list[str], columns: SeriesColumns) -> TableSeries:
    case = columns.case or next(filter(is_index, names), None)
    has_labels = columns.target in names and columns.reads_target
    # A case column that is not there is refused by read_table, with the names that are.
    plain = [name for name in (case, columns.target if has_labels else None) if name is not None]
    rest = [name for name in names if name not in (case, columns.target)]
    channels = channel_steps(rest, columns.channels, str(path))
    steps = list(channels.values())
    table = read_table(path, plain, [name for channel in steps for name in channel])
    sequences = []
    for row, values in enumerate(table.values.reshape(-1, len(channels), len(steps[0]))):
        known = np.flatnonzero(~np.isnan(values).all(axis=0))
        if not len(known):
            raise InputError(f"{table.where(row)}: no step of this case has a value")
        sequences.append(values[:, : known[-1] + 1].T)  # a shorter case leaves its last cells empty
    labels = _texts(table, columns.target) if has_labels else None
    cases = None if case is None else _texts(table, case)
    return TableSeries(sequences, labels, cases, list(channels))


def _texts(table: ColumnTable, name: str) -> list[str]:
    """A column as text; InputError for a missing cell."""
    texts = []
    for row, cell in enumerate(table.cells[name]):
        if cell is None:
            raise InputError(
                f"{table.where(row)}: column {name!r} is empty, or has a mark of missing values "
                "(NA, NaN, NaT, null, None, ?)"
            )
        texts.append(cell)
    return texts


def _times(table: ColumnTable, name: str) -> list[Any]:
    """A column of numbers or dates, as what sorts in time."""
    cells = _texts(table, name)
    different = list(dict.fromkeys(cells))
    orders: list[dict[str, Any]] = []
    readers: tuple[Callable[[str], Any], ...] = (as_number, *DATES)
    if all(cell[4:5] == "-" for cell in different):
        readers = readers[:2]  # where the year is first, the day is last
    for read in readers:
        keys = {}
        for cell in different:
            keys[cell] = read(cell)
            if keys[cell] is None:
                break
        else:
            orders.append(keys)
    if not orders:
        raise _not_a_time(table, name, cells)
    if not orders_agree(different, orders):
        raise InputError(
            f"{table.source}: the times in column {name!r}, such as {different[0]!r}, can be read in two "
            "orders; write numbers or ISO dates (2023-01-05)"
        )
    return [orders[0][cell] for cell in cells]


def _not_a_time(table: ColumnTable, name: str, cells: list[str]) -> InputError:
    kinds: dict[str, Callable[[str], Any]] = {"a number": as_number, "a date (ISO 8601)": DATES[0]}
    first = [kind for kind, read in kinds.items() if read(cells[0]) is not None]
    kind = first[-1] if first else " or ".join(kinds)
    row = next((row for row, cell in enumerate(cells) if not first or kinds[kind](cell) is None), 0)
    return InputError(f"{table.where(row)}: the time {cells[row]!r} in column {name!r} is not {kind}")
