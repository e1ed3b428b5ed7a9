"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kernel_attention.reporting.formats import (
    attention_title,
    format_metric,
    format_seeds,
    format_spread,
    metric_name,
)

if TYPE_CHECKING:
    from rich.table import Table


def headline(summary: Mapping[str, Any]) -> str:
    """The test figure in one line, never without its protocol.

    ``test accuracy 97.84 ± 0.31 % (protocol holdout, seeds 0, 1, 2)``
    """
    metric = str(summary.get("metric", "accuracy"))
    figure = format_spread(metric, summary.get("mean"), summary.get("std"))
    protocol = summary.get("protocol", "unknown")
    return (
        f"test {metric_name(metric)} {figure} (protocol {protocol}, {format_seeds(summary.get('seeds', []))})"
    )


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The content of ``summary.json`` as a table: one row a seed, then mean and deviation.

    The protocol stands in the head of the column of figures and its meaning below the table. Nothing of the
    summary is read as rich markup.
    """
    from rich.table import Table
    from rich.text import Text

    metric = str(summary.get("metric", "accuracy"))
    seeds, values = summary.get("seeds", []), summary.get("values", [])
    names = (summary.get("recipe"), summary.get("dataset"), attention_title(summary.get("attention")))
    table = Table(
        title=Text(" · ".join(str(name) for name in names if name), style="bold"),
        caption=Text(str(summary.get("protocol_text") or ""), style="dim"),
        caption_justify="left",
        show_footer=len(seeds) > 1,
    )
    protocol = summary.get("protocol", "unknown")
    table.add_column("seed", footer=Text("mean ± deviation", style="bold"))
    table.add_column(
        Text(f"test {metric_name(metric)} (protocol {protocol})"),
        footer=Text(format_spread(metric, summary.get("mean"), summary.get("std")), style="bold"),
        justify="right",
    )
    for seed, value in zip(seeds, values, strict=False):
        table.add_row(Text(str(seed)), Text(format_metric(metric, value)))
    return table
