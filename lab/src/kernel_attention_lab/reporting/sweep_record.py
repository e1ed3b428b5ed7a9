"""The content of a report on a sweep, as plain data, and the table of a sweep on the screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from kernel_attention_lab.reporting.formats import (
    attention_details,
    column_name,
    format_spread,
    format_value,
)
from kernel_attention_lab.reporting.tables import text_table

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 20


class SweepPoint(NamedTuple):
    """A point of a sweep.

    Attributes:
        number: from 0.
        keys: its values of the keys that vary; empty where they are not chosen yet.
        state: waiting, begun, complete or failed.
        value: mean of the metric over the seeds.
        values: by seed.
        error: why it failed.
    """

    number: int
    keys: Mapping[str, Any]
    state: str
    value: float | None = None
    values: Sequence[float] = ()
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class SweepRecord:
    """A sweep and its points.

    Args:
        recipe: name of the recipe.
        dataset: name of the data set.
        protocol: holdout, paper, ...
        protocol_text: its meaning, in one sentence.
        metric: column of ``metrics.csv`` that points are compared by.
        split: the cases that it is measured on.
        larger_is_better: whether the best value is the largest.
        space: for each key its list of values, or its range ``{low, high, log, step}``.
        sampler: grid, random or tpe.
        sampler_seed: of its draws.
        seeds: of every point.
        points: all of them.
        importances: share of each key in the variance of the metric; None where it is not known.
        command: that goes on with the sweep.
    """

    recipe: str
    dataset: str
    protocol: str
    protocol_text: str
    metric: str
    split: str
    larger_is_better: bool
    space: Mapping[str, Any]
    sampler: str
    sampler_seed: int
    seeds: Sequence[int]
    points: Sequence[SweepPoint]
    importances: Mapping[str, float] | None
    command: str

    @property
    def metric_text(self) -> str:
        """The metric in words."""
        return column_name(self.metric, self.split)

    def ranked(self) -> list[SweepPoint]:
        """The complete points, the best first; among equals the first one."""
        sign = -1.0 if self.larger_is_better else 1.0
        done = [(sign * point.value, point.number, point) for point in self.points if point.value is not None]
        return [point for *_, point in sorted(done, key=lambda entry: entry[:2])]

    def count(self, state: str) -> int:
        """The number of points in a state."""
        return sum(point.state == state for point in self.points)


def point_value(record: SweepRecord, point: SweepPoint) -> str:
    """A point's mean and deviation over the seeds, or its state."""
    if point.value is None:
        return point.state
    count = len(point.values)
    mean = point.value
    variance = sum((value - mean) ** 2 for value in point.values) / (count - 1) if count > 1 else None
    return format_spread(record.metric, mean, None if variance is None else variance**0.5)


def key_text(key: str, value: Any) -> str:
    """A key's value on one line."""
    return attention_details(value) if key == "attention" else format_value(value)


def sweep_table(record: SweepRecord) -> Table:
    """The points that have begun, and the best ones, at most 20 together; the counts below."""
    states = ("complete", "begun", "failed", "waiting")
    counts = ", ".join(f"{count} {state}" for state in states if (count := record.count(state)))
    title = f"sweep of {record.recipe}: {record.metric_text}, {record.protocol}"
    rows = []
    for point in _shown(record):
        cells = [key_text(key, point.keys[key]) if key in point.keys else "" for key in record.space]
        rows.append([str(point.number), *cells, point_value(record, point)])
    head = ("point", *record.space, record.metric_text)
    return text_table(title, head, rows, caption=f"{len(record.points)} points: {counts}", fold=True)


def _shown(record: SweepRecord) -> list[SweepPoint]:
    begun = [point for point in record.points if point.state == "begun"][:_ROWS]
    return begun + record.ranked()[: _ROWS - len(begun)]
