"""Series in the rows of a table: a step a row (long), or a case a row (wide)."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.series.tables import ColumnTable, column_names, read_table

_NUMBERED = re.compile(r"(.*?)[_.\- ]?(\d+)")


@dataclass(frozen=True)
class SeriesColumns:
    """What the columns of a table hold.

    layout: "long", a step of a case a row; "wide", a case a row, whose steps are columns with numbers;
        "auto", long where ``time`` is named.
    case: the column that names the case; needed in a long table.
    time: the column that orders the steps of a long table; without it they are in the order of the rows.
    target: the column of the label or the value to predict. A file to predict may lack it.
    channels: the columns of the channels of a long table, or the names before the numbers in a wide one;
        without it all other columns.
    """

    layout: Literal["auto", "long", "wide"] = "auto"
    case: str = ""
    time: str = ""
    target: str = "target"
    channels: Sequence[str] = field(default_factory=list)

    @property
    def is_long(self) -> bool:
        """Whether a row is a step."""
        return self.layout == "long" or (self.layout == "auto" and bool(self.time))


class TableSeries(NamedTuple):
    """Sequences (n_i, c) float64 with NaN at gaps, a label of each, and the names of the cases if given."""

    sequences: list[np.ndarray]
    labels: list[str] | None
    cases: list[str] | None


def read_series_table(path: Path, columns: SeriesColumns) -> TableSeries:
    """The series of a table; InputError, with the line or row, for what ``columns`` does not describe."""
    names = column_names(path)
    return (_read_long if columns.is_long else _read_wide)(path, names, columns)


def _read_long(path: Path, names: list[str], columns: SeriesColumns) -> TableSeries:
    if not columns.case:
        raise InputError(
            f"{path}: a table with a step a row needs case_column, the column that names the case of a row "
            f"(it has: {', '.join(names)})"
        )
    plain = [columns.case, *([columns.time] if columns.time else [])]
    plain += [columns.target] if columns.target in names else []
    channels = list(columns.channels) or [name for name in names if name and name not in plain]
    if not channels:
        raise InputError(f"{path}: no column is left for the channels (it has: {', '.join(names)})")
    table = read_table(path, plain, channels)
    rows_of: dict[str, list[int]] = {}
    for row, case in enumerate(_texts(table, columns.case)):
        rows_of.setdefault(case, []).append(row)
    times = _times(table, columns.time) if columns.time else None
    labels = _texts(table, columns.target) if columns.target in names else None
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
    return TableSeries(sequences, found, list(rows_of))


def _read_wide(path: Path, names: list[str], columns: SeriesColumns) -> TableSeries:
    # The index of a frame that pandas wrote has no name.
    case = columns.case or ("" if "" in names else None)
    plain = [name for name in (case, columns.target) if name is not None and name in names]
    if columns.case and columns.case not in names:
        plain.append(columns.case)  # refused by read_table, with the names that are there
    channels = _channels([name for name in names if name not in plain], columns, path)
    table = read_table(path, plain, [name for channel in channels for name in channel])
    steps = len(channels[0])
    sequences = []
    for row, values in enumerate(table.values.reshape(-1, len(channels), steps)):
        known = np.flatnonzero(~np.isnan(values).all(axis=0))
        if not len(known):
            raise InputError(f"{table.where(row)}: no step of this case has a value")
        sequences.append(values[:, : known[-1] + 1].T)  # a shorter case leaves its last cells empty
    labels = _texts(table, columns.target) if columns.target in names else None
    return TableSeries(sequences, labels, None if case is None else _texts(table, case))


def _channels(names: list[str], columns: SeriesColumns, path: Path) -> list[list[str]]:
    """The columns of every channel of a wide table, in the order of their numbers."""
    found: dict[str, dict[int, str]] = {}
    for name in names:
        match = _NUMBERED.fullmatch(name)
        if match is None:
            if columns.channels:
                continue
            raise InputError(
                f"{path}: column {name!r} has no number at its end, as the steps of a case have; name it "
                "with case_column or target_column, or name those that count with channel_columns. Is a row "
                "a step? Then give layout: long"
            )
        steps = found.setdefault(match[1], {})
        if int(match[2]) in steps:
            raise InputError(f"{path}: columns {steps[int(match[2])]!r} and {name!r} have the same number")
        steps[int(match[2])] = name
    for wanted in columns.channels:
        if wanted not in found:
            raise InputError(
                f"{path}: no column is named {wanted!r} with a number after it "
                f"(numbered columns: {', '.join(repr(name) for name in found) or 'none'})"
            )
    chosen = {name: found[name] for name in columns.channels or found}
    if not chosen:
        raise InputError(f"{path}: no column has a number at its end, as the steps of a case have")
    first, *others = chosen
    for other in others:
        if chosen[other].keys() != chosen[first].keys():
            raise InputError(
                f"{path}: channel {first!r} has {len(chosen[first])} numbered columns, channel {other!r} "
                f"{len(chosen[other])} or other numbers; name the channels with channel_columns"
            )
    order = sorted(chosen[first])
    return [[steps[number] for number in order] for steps in chosen.values()]


def _texts(table: ColumnTable, name: str) -> list[str]:
    """A column as text; InputError for an empty cell."""
    texts = ["" if cell is None else str(cell) for cell in table.cells[name]]
    if "" in texts:
        raise InputError(f"{table.where(texts.index(''))}: column {name!r} is empty")
    return texts


def _times(table: ColumnTable, name: str) -> list[Any]:
    """A column of numbers or dates, as what sorts in time."""
    cells = table.cells[name]
    kinds = {"a number": _as_number, "a date (ISO 8601)": _as_date}
    for read in kinds.values():
        times = [read(cell) for cell in cells]
        if None not in times:
            return times
    first = [kind for kind, read in kinds.items() if read(cells[0]) is not None]
    kind = first[0] if first else " or ".join(kinds)
    row = next(row for row, cell in enumerate(cells) if not first or kinds[kind](cell) is None)
    raise InputError(f"{table.where(row)}: the time {cells[row]!r} in column {name!r} is not {kind}")


def _as_number(cell: Any) -> float | None:
    try:
        value = float(cell)
    except (TypeError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _as_date(cell: Any) -> datetime | None:
    try:
        moment = cell if isinstance(cell, date) else datetime.fromisoformat(cell)
    except (TypeError, ValueError):
        return None
    if not isinstance(moment, datetime):
        moment = datetime(moment.year, moment.month, moment.day)
    return moment.replace(tzinfo=moment.tzinfo or UTC)  # so that all of them compare
