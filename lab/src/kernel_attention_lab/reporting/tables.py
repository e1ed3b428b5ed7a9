"""Tables for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_attention_lab.reporting.formats import (
    MISSING,
    attention_title,
    format_metric,
    format_number,
    format_spread,
    layer_name,
    metric_name,
)
from kernel_attention_lab.robustness.attack_plan import ATTACKS, eps_text
from kernel_attention_lab.robustness.masking import attack_title

if TYPE_CHECKING:
    from rich.table import Table

    from kernel_attention.analysis import DiagnosticsReport

_NORMS = {"linf": "L∞", "l2": "L2", "l1": "L1"}
_UNITS = {"pixel": "pixels in [0, 1]", "paper": "deviations of a channel"}


def text_table(
    title: str,
    head: Iterable[str],
    rows: Iterable[Iterable[str]],
    *,
    caption: str | None = None,
    right: Container[int] = (),
    fold: bool = False,
    whole_first: bool = False,
) -> Table:
    """A table of texts, none of which is read as rich markup.

    Args:
        title: above the table.
        head: the names of the columns.
        rows: their cells.
        caption: below the table.
        right: the places of the columns that are aligned to the right.
        fold: whether long cells go on in the next line; otherwise they are cut.
        whole_first: whether the first column is never broken.
    """
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title), caption=None if caption is None else Text(caption))
    for place, name in enumerate(head):
        table.add_column(
            Text(name),
            justify="right" if place in right else "left",
            overflow="fold" if fold else "ellipsis",
            no_wrap=whole_first and place == 0,
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


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
        rows: one record per seed, with the key ``seed``. Lists, such as a confusion matrix, and the bits of
            the right cases are left out.
        title: the title above the table.
    """
    rows = [_with_balanced_accuracy(row) for row in rows]
    keys = dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, list))
    for hidden in ("seed", "correct_bits"):
        keys.pop(hidden, None)
    head = ["figure", *(f"seed {row['seed']}" for row in rows)]
    cells = [[metric_name(key), *(format_metric(key, row.get(key)) for row in rows)] for key in keys]
    return text_table(title, head, cells, right=range(1, len(head)))


def _with_balanced_accuracy(row: Mapping[str, Any]) -> dict[str, Any]:
    """The figures, with the balanced accuracy after the accuracy where classes differ in size."""
    counts = [sum(cells) for cells in row.get("confusion_matrix") or () if sum(cells)]
    if "accuracy" not in row or min(counts, default=0) == max(counts, default=0):
        return dict(row)
    shares = [cells[place] / sum(cells) for place, cells in enumerate(row["confusion_matrix"]) if sum(cells)]
    found = {"seed": row.get("seed"), "accuracy": row["accuracy"]}
    return {**found, "balanced_accuracy": statistics.fmean(shares), **row}


def explanation_table(title: str, channels: Sequence[str], shares: Any) -> Table:
    """The channels by their share in an answer, and the steps of each that count most.

    Args:
        title: above the table.
        channels: c names.
        shares: (N, c), an array.
    """
    whole = float(abs(shares).sum()) or 1.0
    weights = abs(shares).sum(axis=0) / whole
    rows = []
    for channel in (-weights).argsort()[:_EXPLAINED].tolist():
        steps = sorted((-abs(shares[:, channel])).argsort()[:3].tolist())
        told = ", ".join(f"{step} ({shares[step, channel]:+.3g})" for step in steps)
        rows.append([channels[channel], f"{100 * weights[channel]:.1f} %", told])
    caption = "share of all that speaks for or against the answer; steps from 0, + speaks for it"
    return text_table(title, ["channel", "share", "steps that count most"], rows, caption=caption, right=(1,))


_EXPLAINED = 12  # channels at most

# The figures of a layer that the tables show, and their headings.
ATTENTION_HEADINGS = {
    "values_for_90_percent": "values for 90 %",
    "effective_rank": "effective rank",
    "mode_values_for_90_percent": "mode's values for 90 %",
    "mode_rank": "mode's rank",
    "head_distance": "head distance, by row",
    "output_distance": "of outputs, by row",
    "matrix_distance": "head distance, whole",
    "matrix_distance_deviation": "± over pairs and cases",
    "output_matrix_distance": "of outputs, whole",
    "output_matrix_distance_deviation": "± over pairs and cases",
    "objective": "J",
}
PROJECTION_HEADINGS = {
    "projection_error_median": "J_proj (median)",
    "projection_log_length": "log ‖φ(q)‖²",
    "projection_output": "‖h‖²",
    "released_projection_error": "log J_proj, released",
    "gamma_spread": "gamma spread",
    "gamma_deviation": "gamma deviation",
    "gamma_eigenvalue": "gamma eigenvalue",
    "gamma_relative_spread": "spread over eigenvalue",
    "gamma_cosine": "gamma cosine",
}
TABLES = {"The attention": ATTENTION_HEADINGS, "Its kernel-PCA reading": PROJECTION_HEADINGS}


def diagnostics_tables(report: DiagnosticsReport, title: str) -> list[Table]:
    """The means of a diagnosis as tables, one row per layer; no text is read as rich markup."""
    tables = []
    for subject, headings in TABLES.items():
        head, rows = diagnostics_rows(report.records(), headings)
        if len(head) > 1:
            named = f"{title}: {subject[:1].lower()}{subject[1:]}"
            tables.append(text_table(named, head, rows, fold=True, whole_first=True))
    return tables


def diagnostics_rows(
    records: Sequence[Mapping[str, Any]], headings: Mapping[str, str]
) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of ``kernel_attention.analysis.LayerDiagnostics.record``'s figures.

    The last row has the means of the layers, where several have a figure.
    """
    summaries = [record["summary"] for record in records]
    columns = [key for key in headings if any(key in summary for summary in summaries)]

    def cells(summary: Mapping[str, Any]) -> list[str]:
        return [format_number(summary[key]) if key in summary else MISSING for key in columns]

    rows = [
        [f"{layer_name(record['name'])}: {record['mechanism']}", *cells(record["summary"])]
        for record in records
    ]
    if len(records) > 1:
        found = {key: [float(summary[key]) for summary in summaries if key in summary] for key in columns}
        means = {key: statistics.fmean(values) for key, values in found.items() if len(values) > 1}
        rows.append(["mean of the layers", *cells(means)])
    return ["layer", *(headings[key] for key in columns)], rows


def attack_table(record: Mapping[str, Any], title: str) -> Table:
    """The content of ``robustness.json`` as a table, one row per attack; no text is read as rich markup.

    The distance is the median shift of the images that the attack breaks, in the attack's norm.
    """
    units = "; ".join(f"{name}: {unit}" for name, unit in _UNITS.items())
    rows = []
    for entry in record["attacks"]:
        norm = ATTACKS[entry["attack"]].norm
        distance = entry["distances"][norm]
        rows.append(
            [
                attack_title(entry),
                entry["protocol"],
                eps_text(entry["eps"]) or MISSING,
                str(entry["cases"]),
                format_metric("accuracy", entry["accuracy"]),
                MISSING if distance is None else f"{format_number(distance, 3)} ({_NORMS[norm]})",
                f"{entry['seconds']:.1f}",
            ]
        )
    head = ("attack", "protocol", "eps", "images", "accuracy", "distance", "seconds")
    caption = f"eps and distance in units of the protocol ({units})"
    return text_table(title, head, rows, caption=caption, right=range(2, 7))


def shift_lines(record: Mapping[str, Any]) -> list[str]:
    """The figures of ``robustness.json`` on corrupted and on unseen images, a line each."""
    lines = []
    if (corrupted := record.get("corruptions")) is not None:
        lines.append(
            f"corruptions: accuracy {format_metric('accuracy', corrupted['accuracy'])} on average over "
            f"{len(corrupted['accuracies'])} corruptions, {len(corrupted['severities'])} severities and "
            f"{corrupted['cases']} images"
        )
    if (unseen := record.get("out_of_distribution")) is not None:
        lines.append(
            f"out of distribution: AUPR {100 * unseen['aupr']:.2f} %, AUROC {100 * unseen['auroc']:.2f} %, "
            f"{unseen['out_cases']} images of {unseen['unseen']} among {unseen['in_cases']} of the test split"
        )
    for name in ("uncertainty", "ensemble"):
        measured = record.get(name, {"methods": {}, "absent": {}})
        lines += [f"{method}: {_calibrated(figures)}" for method, figures in measured["methods"].items()]
        lines += [f"{kind}: not measured ({why})" for kind, why in measured["absent"].items()]
    return lines


def _calibrated(figures: Mapping[str, Any]) -> str:
    """The figures of a method on every set of images, in a line."""
    parts = [
        f"{kind}: accuracy {format_metric('accuracy', found['accuracy'])}, NLL {found['nll']:.3f}, "
        f"ECE {100 * found['ece']:.2f} %"
        for kind in ("known", "corrupted")
        if (found := figures.get(kind))
    ]
    if unseen := figures.get("unseen"):
        parts.append(f"unseen: AUROC {100 * unseen['auroc']:.2f} %")
    return "; ".join(parts)
