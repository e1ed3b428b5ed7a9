"""What the README says of robustness, from the records in results/vision."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import robustness_tables
from robustness_tables import ATTACKS, COLUMNS, RECORDS, ROWS, SIGNIFICANT, SMALLER_IS_BETTER

from kernel_attention_lab.results import Comparison, read_records

PAGE = Path("README.md")


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the README's region, and no figures."""
    records = read_records(root / RECORDS)
    line = said(len(records), robustness_tables.comparisons_of(records))
    return {"robustness": ["", line, ""]}, {}


def said(models: int, comparisons: Sequence[Comparison]) -> str:
    """The outcome of all paired comparisons with the baselines."""
    counted = f"{len(comparisons)} comparisons of {models} small vision transformers with their baselines"
    opening = "On attacked and corrupted CIFAR-10 images"
    found = [each for each in comparisons if each.adjusted <= SIGNIFICANT]
    if not found:
        return f"{opening}, {counted} have found no difference so far."
    parts = []
    for word, is_better in (("better", True), ("worse", False)):
        chosen = [each for each in found if _is_better(each) == is_better]
        parts += [f"{word} are {_named(chosen)}"] if chosen else []
    closing = "We have found no other difference so far."
    if not any(each.column in ATTACKS for each in found):
        closing = "Under attack we have found no difference so far."
    return f"{opening}, {counted} have found these differences: {'; '.join(parts)}. {closing}"


def _is_better(each: Comparison) -> bool:
    return (each.interval.difference > 0) != (each.column in SMALLER_IS_BETTER)


def _named(comparisons: Sequence[Comparison]) -> str:
    """``symmetric (clean, FGSM) and scaled (AUPR)``."""
    columns: dict[str, list[str]] = {}
    for each in comparisons:
        columns.setdefault(ROWS[each.row][0], []).append(COLUMNS[each.column])
    return " and ".join(f"{row} ({', '.join(names)})" for row, names in columns.items())
