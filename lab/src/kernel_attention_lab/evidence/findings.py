"""The findings of a suite: figures beside those reported, comparisons, and what is missing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kernel_attention_lab.evidence.comparison import (
    ColumnComparison,
    Comparison,
    Measurement,
    Spread,
    columns_needed,
    compare_over_columns,
    compare_rows,
    evaluation_figure,
    spread,
)
from kernel_attention_lab.evidence.records import ResultRecord, read_record
from kernel_attention_lab.evidence.run import Places
from kernel_attention_lab.evidence.suite import Cell, Figures, Suite
from kernel_attention_lab.reporting.formats import is_share

Measured = dict[str, dict[str, dict[int, Measurement]]]
"""By row, column and seed."""
SIGNIFICANT = 0.05
NO_DIFFERENCE = "no difference found"
TOO_FEW = "too few columns to test"
FEWEST = 3  # columns of a comparison over columns, and rows and columns of a critical-difference diagram


def suite_records(suite: Suite, places: Places) -> dict[str, dict[str, dict[int, ResultRecord]]]:
    """The suite's records by row, column and seed, also of seeds that the suite does not name.

    Raises:
        InputError: for a damaged record.
    """
    found: dict[str, dict[str, dict[int, ResultRecord]]] = {row: {} for row in suite.rows}
    for cell in suite.cells(seeds=[0]):
        own = places.record(suite, cell)
        paths = own.parent.glob(f"{cell.row}-*.json")
        records = [read_record(path) for path in paths if _is_seed(path.stem, cell.row)]
        if records:
            ordered = sorted(records, key=lambda record: record.seed)
            found[cell.row][cell.column] = {record.seed: record for record in ordered}
    return found


def figures_of(records: dict[str, dict[str, dict[int, ResultRecord]]], metric: str) -> Measured:
    """A figure of these records, where they have it, with the answers behind an accuracy.

    ``train_seconds`` is what the training took.
    """
    found: Measured = {}
    for row, columns in records.items():
        found[row] = {}
        for column, by_seed in columns.items():
            figures = {
                seed: record.single_figures | {"train_seconds": record.budget.get("seconds")}
                for seed, record in by_seed.items()
            }
            cell = {
                seed: evaluation_figure(each, metric)
                for seed, each in figures.items()
                if each.get(metric) is not None
            }
            if cell:
                found[row][column] = cell
    return found


def _is_seed(stem: str, row: str) -> bool:
    return stem.removeprefix(f"{row}-").isdecimal()


class Line(NamedTuple):
    """A figure of one row and column, in the unit in which it is reported.

    Attributes:
        row: the row.
        column: the column.
        reported: (mean, deviation) of the source; None where it reports none.
        measured: over the seeds; None without a record.
    """

    row: str
    column: str
    reported: tuple[float, float | None] | None
    measured: Spread | None

    @property
    def difference(self) -> float | None:
        """Measured minus reported."""
        if self.measured is None or self.reported is None:
            return None
        return self.measured.mean - self.reported[0]


@dataclass(frozen=True)
class Findings:
    """The findings of the records of a suite.

    Args:
        suite: the suite.
        records: in the order of rows, columns and seeds.
        lines: by figure, in the order of columns and rows.
        over_cases: each row against each of its baselines in one column, on the same cases.
        over_columns: each row against each of its baselines over the columns.
        scores: of the rows and columns of a critical-difference diagram, by row and column; empty where there
            are too few.
        missing: the cells without a record.
    """

    suite: Suite
    records: tuple[ResultRecord, ...]
    lines: dict[str, list[Line]]
    over_cases: list[Comparison]
    over_columns: list[ColumnComparison]
    scores: dict[str, dict[str, float]]
    missing: list[Cell]


def find(suite: Suite, places: Places) -> Findings:
    """Read the records of a suite and compare them.

    Raises:
        InputError: for a damaged record, and for rows that were measured on different cases.
    """
    records = suite_records(suite, places)
    measured = figures_of(records, suite.metric)
    baselines = suite.compared_with()
    return Findings(
        suite=suite,
        records=tuple(each for row in records.values() for cell in row.values() for each in cell.values()),
        lines={
            metric: _lines(suite, metric, reported, figures_of(records, metric))
            for metric, reported in suite.figures().items()
        },
        over_cases=compare_rows(measured, baselines),
        over_columns=compare_over_columns(measured, baselines, columns=FEWEST),
        scores=_scores(measured),
        missing=[cell for cell in suite.cells() if cell.seed not in records[cell.row].get(cell.column, {})],
    )


def verdict(adjusted: float, difference: float, larger_is_better: bool) -> str:
    """``better``, ``worse`` or ``no difference found``."""
    if adjusted > SIGNIFICANT or difference == 0:
        return NO_DIFFERENCE
    return "better" if (difference > 0) == larger_is_better else "worse"


def column_verdict(each: ColumnComparison, larger_is_better: bool) -> str:
    """``verdict`` over the columns, or that there are too few of them for any outcome to tell."""
    if each.least > SIGNIFICANT:
        return TOO_FEW
    return verdict(each.adjusted, each.mean, larger_is_better)


def column_sentence(each: ColumnComparison, comparisons: int, larger_is_better: bool, unit: str) -> str:
    """The outcome of a comparison over columns, one of so many made together, in a sentence.

    Args:
        each: the comparison.
        comparisons: how many were made together.
        larger_is_better: whether the larger figure is the better one.
        unit: what a column is called, in the plural: columns, sets.
    """
    better, worse = (each.larger, each.smaller) if larger_is_better else (each.smaller, each.larger)
    said = column_verdict(each, larger_is_better)
    counts = f"better on {better}, worse on {worse} of {len(each.differences)}"
    if said == TOO_FEW:
        needed = columns_needed(comparisons, SIGNIFICANT)
        made = "one comparison needs" if comparisons == 1 else f"{comparisons} comparisons need"
        return f"Too few {unit} to test {each.row} against {each.baseline} ({counts}; {made} {needed})."
    if said == NO_DIFFERENCE:
        return (
            f"No difference found between {each.row} and {each.baseline} over the {unit} "
            f"({counts}; p {chance(each.adjusted)})."
        )
    return f"{each.row} is {said} than {each.baseline} over the {unit} ({counts}; p {chance(each.adjusted)})."


def chance(p_value: float) -> str:
    """A p value with two digits and its sign."""
    return "< 0.0001" if p_value < 1e-4 else f"= {p_value:.2g}" if p_value < 0.995 else "= 1"


def _lines(suite: Suite, metric: str, reported: Figures, measured: Measured) -> list[Line]:
    unit = 100.0 if is_share(metric) else 1.0
    found = []
    for column in suite.columns:
        for row in suite.rows:
            said = reported.get(row, {}).get(column)
            cell = measured[row].get(column)
            if said is None and cell is None:
                continue
            found.append(
                Line(row, column, _pair(said), None if cell is None else _scaled(spread(cell), unit))
            )
    return found


def _pair(reported: float | list[float] | None) -> tuple[float, float | None] | None:
    if reported is None:
        return None
    return (reported[0], reported[1]) if isinstance(reported, list) else (reported, None)


def _scaled(found: Spread, unit: float) -> Spread:
    deviation = None if found.deviation is None else unit * found.deviation
    return Spread(unit * found.mean, deviation, found.seeds)


def _scores(measured: Measured) -> dict[str, dict[str, float]]:
    """The means of the rows with enough columns, in the columns that all of them have."""
    rows = {row: cells for row, cells in measured.items() if len(cells) >= FEWEST}
    if len(rows) < FEWEST:
        return {}
    columns = [column for column in next(iter(rows.values())) if all(column in row for row in rows.values())]
    if len(columns) < FEWEST:
        return {}
    return {row: {column: spread(cells[column]).mean for column in columns} for row, cells in rows.items()}
