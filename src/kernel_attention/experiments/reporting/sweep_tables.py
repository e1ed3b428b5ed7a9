"""A sweep on the screen: while it runs, and at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kernel_attention.experiments.reporting.sweep_record import (
    SweepPoint,
    SweepRecord,
    key_text,
    point_value,
)

if TYPE_CHECKING:
    from rich.table import Table

_ROWS = 20


def sweep_table(record: SweepRecord) -> Table:
    """The points that have begun, and the best ones, at most 20 together; the counts below."""
    from rich.table import Table
    from rich.text import Text

    states = ("complete", "begun", "failed", "waiting")
    counts = ", ".join(f"{count} {state}" for state in states if (count := record.count(state)))
    title = f"sweep of {record.recipe}: {record.metric_text}, {record.protocol}"
    table = Table(title=Text(title), caption=Text(f"{len(record.points)} points: {counts}"))
    for name in ("point", *record.space, record.metric_text):
        table.add_column(Text(name), overflow="fold")
    for point in _shown(record):
        cells = [key_text(key, point.keys[key]) if key in point.keys else "" for key in record.space]
        table.add_row(*map(Text, [str(point.number), *cells, point_value(record, point)]))
    return table


def _shown(record: SweepRecord) -> list[SweepPoint]:
    begun = [point for point in record.points if point.state == "begun"][:_ROWS]
    return begun + record.ranked()[: _ROWS - len(begun)]
