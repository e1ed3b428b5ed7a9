"""The tables of docs/significance.md: every row against its baseline over all data sets that were measured.

Suites of the same rows, such as two tables of one paper on different data sets, are one comparison.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from generated import table
from reproduction_tables import suites

from kernel_attention_lab.reporting.formats import is_share, metric_name
from kernel_attention_lab.reproduction import Places, Suite
from kernel_attention_lab.reproduction.findings import (
    Measured,
    chance,
    column_sentence,
    column_verdict,
    measurements,
)
from kernel_attention_lab.reproduction.page import signed
from kernel_attention_lab.results import ColumnComparison, columns_needed, compare_over_columns

PAGE = Path("docs/significance.md")
NOTHING = ["", "No two rows of a suite have been measured on two common data sets yet.", ""]


class Family(NamedTuple):
    """Suites that compare the same rows in the same way, on different data sets.

    Attributes:
        suites: at least one.
        comparisons: of the rows, over the data sets of all suites.
    """

    suites: list[Suite]
    comparisons: list[ColumnComparison]


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks; there are no figures."""
    found = families(root)
    needed = [[str(count), str(columns_needed(count))] for count in (1, 2, 3, 4, 6, 8, 11)]
    regions = {
        "significance": [line for family in found for line in section(family)] or NOTHING,
        "sets-needed": ["", *table(["comparisons made together", "data sets needed"], needed), ""],
    }
    return regions, {}


def families(root: Path) -> list[Family]:
    """The comparisons over two data sets or more, by the rows of the suites."""
    places = Places(root / "runs", root / "results")
    groups: list[list[Suite]] = []
    for suite in suites(root):
        same = next((group for group in groups if _kind(group[0]) == _kind(suite)), None)
        if same is None:
            groups.append([suite])
        else:
            same.append(suite)
    found = []
    for group in groups:
        measured: Measured = {row: {} for row in group[0].rows}
        present = []  # a suite without a record has no place on the page of reproductions
        for suite in group:
            by_row = measurements(suite, places)
            if any(by_row.values()):
                present.append(suite)
            for row, cells in by_row.items():
                measured[row] |= cells
        comparisons = compare_over_columns(measured, group[0].compared_with(), columns=2)
        if comparisons:
            found.append(Family(present, comparisons))
    return found


def section(family: Family) -> list[str]:
    """The outcome in sentences, and the table."""
    first = family.suites[0]
    unit = 100.0 if is_share(first.metric) else 1.0
    count = len(family.comparisons)
    lines = [
        [
            f"`{each.row}`", f"`{each.baseline}`", str(len(each.differences)),
            *map(str, _better_worse(each, first.larger_is_better)), signed(unit * each.mean),
            chance(each.p_value).removeprefix("= "), chance(each.adjusted).removeprefix("= "),
            column_verdict(each, first.larger_is_better).replace("columns", "sets"),
        ]
        for each in family.comparisons
    ]  # fmt: skip
    sets = sorted({column for each in family.comparisons for column in each.differences})
    protocol = f"protocol {first.protocol}" if first.protocol else "the protocol of the recipes"
    links = " and ".join(f"[`{suite.name}`](reproduction.md#{suite.name})" for suite in family.suites)
    sentences = [column_sentence(each, count, first.larger_is_better, "sets") for each in family.comparisons]
    head = ["row", "baseline", "sets", "better", "worse", "mean difference", "p", "p (Holm)", "finding"]
    return [
        "",
        f"### {first.title}",
        "",
        f"{metric_name(first.metric).capitalize()}, {protocol}, {links}, on {', '.join(sets)}.",
        "",
        *(f"* {sentence}" for sentence in sentences),
        "",
        *table(head, lines),
        "",
    ]


def _kind(suite: Suite) -> tuple[object, ...]:
    return suite.rows, suite.keys, suite.baselines, suite.metric, suite.protocol, suite.larger_is_better


def _better_worse(each: ColumnComparison, larger_is_better: bool) -> Sequence[int]:
    return (each.larger, each.smaller) if larger_is_better else (each.smaller, each.larger)
