"""Rows of a table compared over its columns, which are data sets."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from kernel_attention_lab.results.comparison import (
    Baselines,
    Measurement,
    Measurements,
    compared_pairs,
)
from kernel_attention_lab.statistics import DECIMALS, holm, signed_rank_test


class ColumnComparison(NamedTuple):
    """A row against its baseline over the columns that both were measured in.

    Attributes:
        row: the row.
        baseline: the row it is compared with.
        differences: row minus baseline by column, the mean over the seeds that both have, to ``DECIMALS``.
        p_value: of ``signed_rank_test``.
        adjusted: the same after Holm's adjustment for all comparisons made together.
        least: the adjusted value if all differences of all comparisons had one sign. No outcome in so few
            columns gives a smaller one.
    """

    row: str
    baseline: str
    differences: dict[str, float]
    p_value: float
    adjusted: float
    least: float

    @property
    def larger(self) -> int:
        """The number of columns in which the row has the larger figure."""
        return sum(value > 0 for value in self.differences.values())

    @property
    def smaller(self) -> int:
        """The number of columns in which the row has the smaller figure."""
        return sum(value < 0 for value in self.differences.values())

    @property
    def mean(self) -> float:
        """The mean difference."""
        return sum(self.differences.values()) / len(self.differences)


def compare_over_columns(
    measurements: Measurements, baselines: Baselines, *, columns: int = 3
) -> list[ColumnComparison]:
    """Compare rows with their baselines over the columns.

    Args:
        measurements: by row, column and seed.
        baselines: of the rows.
        columns: how many columns a comparison needs at least.

    Returns:
        In the order of rows and baselines. The p values are adjusted over all of them.
    """
    found = []
    for row, baseline in compared_pairs(measurements, baselines):
        others = measurements.get(baseline, {})
        differences = {
            column: value
            for column, measured in measurements[row].items()
            if (value := _difference(measured, others.get(column, {}))) is not None
        }
        if len(differences) >= columns:
            p_value = signed_rank_test(list(differences.values()))
            least = _least_p(len(differences))
            found.append(ColumnComparison(row, baseline, differences, p_value, p_value, least))
    adjusted, least_adjusted = holm([each.p_value for each in found]), holm([each.least for each in found])
    return [
        each._replace(adjusted=value, least=least)
        for each, value, least in zip(found, adjusted, least_adjusted, strict=True)
    ]


def columns_needed(comparisons: int, level: float = 0.05) -> int:
    """The least number of columns in which so many comparisons, made together, can reach ``level``."""
    return next(count for count in itertools.count(1) if comparisons * _least_p(count) <= level)


def _least_p(columns: int) -> float:
    """The p value of ``signed_rank_test`` where all differences have one sign."""
    return min(1.0, 2.0 ** (1 - columns))


def _difference(first: Mapping[int, Measurement], second: Mapping[int, Measurement]) -> float | None:
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    difference = sum(first[seed].value - second[seed].value for seed in seeds) / len(seeds)
    return round(difference, DECIMALS)
