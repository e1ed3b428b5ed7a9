"""Rows of a table: means over seeds, and comparisons with another row, by case and over the columns."""

from __future__ import annotations

import itertools
import statistics
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.statistics import (
    DECIMALS,
    Interval,
    figure_test,
    holm,
    paired_bootstrap,
    sign_flip_test,
    signed_rank_test,
)
from kernel_attention_lab.packing import LEVELS, unpack_bits
from kernel_attention_lab.robustness import precision_recall_area


class PairedFigure(ABC):
    """A figure of one model that is no mean over its cases, but follows from sums over them."""

    @abstractmethod
    def values(self) -> list[np.ndarray]:
        """For each kind of cases what is summed, (cases, values), float32."""

    @staticmethod
    @abstractmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The figure minus that of a baseline, (resamples,), from the sums of both, (resamples, values)."""


@dataclass(frozen=True, eq=False)
class CorruptionErrors(PairedFigure):
    """The mean corruption error relative to a baseline, whose own is 1.

    wrong: (corruptions, cases), the number of severities at which an image is wrong.
    """

    wrong: np.ndarray

    def values(self) -> list[np.ndarray]:
        """The errors of each image by corruption."""
        return [self.wrong.T.astype(np.float32)]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """Where the baseline makes no error under a corruption in a resample, half an error stands for it."""
        ratios: np.ndarray = (sums[0] / np.maximum(baseline[0], 0.5).astype(np.float64)).mean(axis=1)
        return ratios - 1


@dataclass(frozen=True, eq=False)
class Detection(PairedFigure):
    """The AUPR of a detector, from the levels of its scores (``score_levels``).

    known: (n,) levels of images of the classes.
    unseen: (m,) levels of images of no known class.
    """

    known: np.ndarray
    unseen: np.ndarray

    _AT_LEVEL: ClassVar[np.ndarray] = np.eye(LEVELS, dtype=np.float32)

    def values(self) -> list[np.ndarray]:
        """A one at each image's level."""
        return [self._AT_LEVEL[levels] for levels in (self.known, self.unseen)]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The difference of the areas under the precision-recall curves."""
        ours, theirs = (
            precision_recall_area(*(each.astype(np.float64) for each in found)) for found in (sums, baseline)
        )
        return ours - theirs


@dataclass(frozen=True, eq=False)
class Measurement:
    """A figure of one model.

    Args:
        value: the figure.
        correct: (trials, cases) bool, the answers behind it: one trial for a test split, one for each
            corruption and severity; None for a figure that is not a share of right answers.
        paired: what a comparison on the same cases needs of another figure; None where it is not known.
    """

    value: float
    correct: np.ndarray | None = None
    paired: PairedFigure | None = None

    @property
    def cases(self) -> int:
        """The number of cases; 0 where their answers are not kept."""
        return 0 if self.correct is None else self.correct.shape[-1]


def evaluation_figure(figures: Mapping[str, Any], metric: str) -> Measurement:
    """A figure of ``evaluation.json``, with the answers behind an accuracy where they are kept."""
    bits = figures.get("correct_bits") if metric == "accuracy" else None
    correct = None if bits is None else unpack_bits(bits, figures["cases"])[None]
    return Measurement(float(figures[metric]), correct)


Measurements = Mapping[str, Mapping[str, Mapping[int, Measurement]]]
"""By row, column and seed. Seeds may be missing, and so may columns of a row."""

Baselines = Mapping[str, str | Sequence[str]]
"""By row, the row that it is compared with, or several. A row without one is not compared."""


class Spread(NamedTuple):
    """Mean and sample deviation over ``seeds``; no deviation of a single seed."""

    mean: float
    deviation: float | None
    seeds: tuple[int, ...]


class Comparison(NamedTuple):
    """A row against its baseline in one column, on the seeds that both have.

    Attributes:
        row: the row.
        baseline: the row it is compared with.
        column: the column.
        seeds: the seeds.
        interval: the difference, row minus baseline, with its bootstrap interval over cases and seeds.
        p_value: of ``sign_flip_test`` over the cases; for a ``PairedFigure`` of ``figure_test``.
        adjusted: the same after Holm's adjustment for all comparisons made together.
        by_seed: the p value of McNemar's test for each seed; empty where a case has several trials, and for a
            ``PairedFigure``.
    """

    row: str
    baseline: str
    column: str
    seeds: tuple[int, ...]
    interval: Interval
    p_value: float
    adjusted: float
    by_seed: dict[int, float]


def spread(measured: Mapping[int, Measurement]) -> Spread:
    """Mean and deviation over the seeds, of which there must be at least one."""
    seeds = tuple(sorted(measured))
    values = [measured[seed].value for seed in seeds]
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return Spread(statistics.fmean(values), deviation, seeds)


def compared_pairs(measurements: Measurements, baselines: Baselines) -> Iterator[tuple[str, str]]:
    """Each measured row with each of its baselines, in the order of the rows."""
    for row in measurements:
        given = baselines.get(row, ())
        for baseline in [given] if isinstance(given, str) else given:
            yield row, baseline


def compare_rows(measurements: Measurements, baselines: Baselines) -> list[Comparison]:
    """Compare rows with their baselines, in every column whose answers or scores both keep for a common seed.

    Args:
        measurements: by row, column and seed.
        baselines: of the rows.

    Returns:
        In the order of rows, baselines and columns. The p values are adjusted over all of them.

    Raises:
        InputError: where a row and its baseline were not measured on the same number of cases.
    """
    found = []
    for row, baseline in compared_pairs(measurements, baselines):
        others = measurements.get(baseline, {})
        for column, measured in measurements[row].items():
            compared = _compare(row, baseline, column, measured, others.get(column, {}))
            found += [] if compared is None else [compared]
    adjusted = holm([each.p_value for each in found])
    return [each._replace(adjusted=value) for each, value in zip(found, adjusted, strict=True)]


def _compare(
    row: str,
    baseline: str,
    column: str,
    measured: Mapping[int, Measurement],
    others: Mapping[int, Measurement],
) -> Comparison | None:
    ours = {seed: each.correct for seed, each in sorted(measured.items()) if each.correct is not None}
    theirs = {seed: each.correct for seed, each in others.items() if each.correct is not None}
    seeds = tuple(seed for seed in ours if seed in theirs)
    if not seeds:
        return _compare_figures(row, baseline, column, measured, others)
    shapes = {array.shape for answers in (ours, theirs) for seed in seeds if (array := answers[seed]).size}
    if len(shapes) != 1:
        sizes = ", ".join(map(str, sorted(shapes)))
        raise InputError(f"{row} and {baseline} in {column}: measured on different cases, {sizes}")
    first, second = (np.stack([answers[seed] for seed in seeds]) for answers in (ours, theirs))
    p_value = sign_flip_test(first, second)
    return Comparison(
        row=row,
        baseline=baseline,
        column=column,
        seeds=seeds,
        interval=paired_bootstrap(first.mean(axis=1), second.mean(axis=1)),
        p_value=p_value,
        adjusted=p_value,
        by_seed={
            seed: sign_flip_test(first[index, 0], second[index, 0])
            for index, seed in enumerate(seeds)
            if first.shape[1] == 1
        },
    )


def _compare_figures(
    row: str,
    baseline: str,
    column: str,
    measured: Mapping[int, Measurement],
    others: Mapping[int, Measurement],
) -> Comparison | None:
    pairs = {
        seed: (each.paired, other.paired)
        for seed, each in sorted(measured.items())
        if (other := others.get(seed)) is not None and each.paired is not None and other.paired is not None
    }
    if not pairs:
        return None
    ours, theirs = ([figure.values() for figure in side] for side in zip(*pairs.values(), strict=True))
    sizes = {tuple(len(each) for each in values) for values in (*ours, *theirs)}
    if len(sizes) != 1:
        shown = ", ".join(map(str, sorted(sizes)))
        raise InputError(f"{row} and {baseline} in {column}: measured on different cases, {shown}")
    first, second = ([np.stack(kind) for kind in zip(*side, strict=True)] for side in (ours, theirs))
    figure = next(iter(pairs.values()))[0]
    interval, p_value = figure_test(figure.difference, first, second)
    return Comparison(row, baseline, column, tuple(pairs), interval, p_value, p_value, {})


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
