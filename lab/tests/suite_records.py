"""Records of imaginary trainings: a suite's own recipes, with figures that a test chooses."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from kernel_attention_lab.evidence import Cell, ResultRecord, Suite, write_records


def suite_record(
    suite: Suite, row: str, column: str, seed: int = 0, *, config: dict[str, Any] | None = None, **fields: Any
) -> ResultRecord:
    """The record of a cell, whose ``fields`` (``figures``, say) and keys of the recipe may be others."""
    _, recipe = suite.recipe(Cell(row, column, seed))
    keys = {key: value for key, value in recipe.keys().items() if key != "seeds"}
    record = ResultRecord(
        label=row,
        seed=seed,
        recipe=suite.columns[column],
        config=keys | (config or {}),
        budget={"seconds": 100.0},
        software={},
        machine="x86_64, 2 cores, 1 thread, no GPU",
        date="2026-11-22T05:00:00+00:00",
        revision=None,
        figures={},
    )
    return dataclasses.replace(record, **fields)


def write_suite_record(root: Path, suite: Suite, row: str, column: str, seed: int = 0, **fields: Any) -> None:
    """Write a record where the suite keeps that of the cell, below ``root``."""
    folder = root / "results" / suite.records
    record = suite_record(suite, row, column, seed, **fields)
    write_records([record], folder / column if len(suite.columns) > 1 else folder)
