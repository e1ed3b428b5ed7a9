"""What a suite's records say."""

from __future__ import annotations

from kernel_attention.experiments.reproduction.run import Places
from kernel_attention.experiments.reproduction.suite import Suite
from kernel_attention.experiments.results import (
    Measurement,
    ResultRecord,
    evaluation_figure,
    read_record,
)

Measured = dict[str, dict[str, dict[int, Measurement]]]
"""By row, column and seed."""


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


def measurements(suite: Suite, places: Places, metric: str | None = None) -> Measured:
    """A figure (the suite's metric by default) by row, column and seed, as far as there are records.

    The answers behind an accuracy come with it where the record has them.

    Raises:
        InputError: for a damaged record.
    """
    return figures_of(suite_records(suite, places), metric or suite.metric)


def figures_of(records: dict[str, dict[str, dict[int, ResultRecord]]], metric: str) -> Measured:
    """A figure of these records, where they have it."""
    found: Measured = {}
    for row, columns in records.items():
        found[row] = {}
        for column, by_seed in columns.items():
            figures = {
                seed: record.figures.get("diagnostics", {}) | record.figures["evaluation"]
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
