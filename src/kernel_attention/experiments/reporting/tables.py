"""Tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_attention.experiments.reporting.formats import (
    MISSING,
    attention_title,
    format_metric,
    format_number,
    format_spread,
    layer_name,
    metric_name,
)

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_attention.analysis import DiagnosticsReport


def summary_table(summary: Mapping[str, Any]) -> Table:
    """The content of ``summary.json`` as a table: one row per seed, then mean and deviation.

    The head of the column of figures names the protocol, and its meaning is below the table. No text of the
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


def evaluation_table(rows: Sequence[Mapping[str, Any]], title: str) -> Table:
    """The figures of every seed, one row per seed; no text is read as rich markup.

    Args:
        rows: one record per seed, with the key ``seed``; lists, such as a confusion matrix, are left out.
        title: the title above the table.
    """
    from rich.table import Table
    from rich.text import Text

    keys = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list))
    keys.pop("seed", None)
    table = Table(title=Text(title))
    table.add_column("figure")
    for row in rows:
        table.add_column(Text(f"seed {row['seed']}"), justify="right")
    for key in keys:
        table.add_row(Text(metric_name(key)), *(Text(format_metric(key, row.get(key))) for row in rows))
    return table


# The figures of a layer that a table shows, and their headings.
DIAGNOSTIC_HEADINGS = {
    "values_for_90_percent": "values for 90 %",
    "effective_rank": "effective rank",
    "head_distance": "head distance",
    "output_distance": "distance of head outputs",
    "projection_error_median": "J_proj (median)",
    "gamma_spread": "gamma spread",
    "gamma_eigenvalue": "gamma eigenvalue",
    "gamma_cosine": "gamma cosine",
    "objective": "J",
}


def diagnostics_table(report: DiagnosticsReport, title: str) -> Table:
    """The means of a diagnosis as a table, one row per layer; no text is read as rich markup."""
    from rich.table import Table
    from rich.text import Text

    head, rows = diagnostics_rows(report.records())
    table = Table(title=Text(title))
    for name in head:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def diagnostics_rows(records: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of ``kernel_attention.analysis.LayerDiagnostics.record``'s figures."""
    columns = [key for key in DIAGNOSTIC_HEADINGS if any(key in record["summary"] for record in records)]
    rows = [
        [
            f"{layer_name(record['name'])}: {record['mechanism']}",
            *(
                format_number(value) if (value := record["summary"].get(key)) is not None else MISSING
                for key in columns
            ),
        ]
        for record in records
    ]
    return ["layer", *(DIAGNOSTIC_HEADINGS[key] for key in columns)], rows
