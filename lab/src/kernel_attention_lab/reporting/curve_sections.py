"""The parts of the report that follow the training: learning curves and the objective."""

from __future__ import annotations

import re

import numpy as np

from kernel_attention_lab.reporting import html, plots
from kernel_attention_lab.reporting.figures import data_uri
from kernel_attention_lab.reporting.formats import (
    column_name,
    format_metric,
    format_number,
    is_share,
    metric_name,
)
from kernel_attention_lab.reporting.records import Curve, RunRecord, SeedRecord

ROW_LIMIT = 30  # rows listed for each seed; metrics.csv has all of them
QUANTITIES = (
    "loss", "accuracy", "mean_iou", "pixel_accuracy", "rmse", "r2", "normalized_score", "episode_return",
)  # fmt: skip


def curves_section(run: RunRecord) -> html.Section:
    """Loss and accuracy (RMSE and R² for regression) of training and validation by epoch or step."""
    title = "Learning curves"
    charts = [chart for name in QUANTITIES if (chart := _learning_chart(run, name))]
    if not charts:
        return html.Section("curves", title, [_nothing_yet(run)])
    tables = [_table(run, record) for record in run.seeds if record.metrics]
    return html.Section(
        "curves",
        title,
        [
            html.Pictures(charts, pair=len(charts) == 2 and len(run.seeds) == 1),
            html.Folded("The numbers behind the curves", tables),
        ],
    )


def _nothing_yet(run: RunRecord) -> html.Piece:
    return html.Paragraph(f"No {run.unit} has been completed yet.")


def _learning_chart(run: RunRecord, name: str) -> html.Picture | None:
    train = _curves(run, f"train_{name}")
    evaluated = _curves(run, f"val_{name}")
    if not train and not evaluated:
        return None
    where = run.selection_split
    figure = plots.learning_curves(
        train,
        evaluated,
        _axis_name(run, name),
        evaluated_label=where,
        unit=run.unit,
        percent=is_share(name),
        selected={record.seed: record.selected for record in run.seeds if record.selected is not None},
    )
    ends = [
        _ending(name, words, curves) for words, curves in (("training", train), (where, evaluated)) if curves
    ]
    seeds = f" for {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    alt = f"Line chart of the {metric_name(name)} over the {run.unit}s{seeds}. {' '.join(ends)}"
    caption = f"{_capital(_axis_name(run, name))} by {run.unit}. {_caption(run, name)}"
    return html.Picture(data_uri(figure), alt, caption.strip(), wide=len(run.seeds) > 1)


def _axis_name(run: RunRecord, name: str) -> str:
    per_token = run.task == "language" and name == "loss"
    return f"{metric_name(name)}{' (nats per token)' if per_token else ''}"


def _caption(run: RunRecord, name: str) -> str:
    parts = []
    if name == "loss" and any(_objectives(run)):
        parts.append("The task's loss alone, without the objective.")
    if name == "loss" and run.task == "language":
        parts.append("Its exponential is the perplexity.")
    if run.is_selected_on_test:
        parts.append(
            f"Under the protocol {run.protocol} the {run.unit} is selected on the {run.selection_split}, "
            "which these curves show."
        )
    if len(run.seeds) > 1:
        parts.append("One light line per seed, their mean dark.")
    return " ".join(parts)


def _ending(name: str, words: str, curves: dict[int, Curve]) -> str:
    last = float(np.mean([curve[1][-1] for curve in curves.values()]))
    return f"{_capital(words)} ends at {format_metric(name, last)}{' on average' if len(curves) > 1 else ''}."


def objective_section(run: RunRecord) -> html.Section:
    """The auxiliary objective J of each layer by epoch or step."""
    title = "Objective"
    if not any(record.metrics for record in run.seeds):
        return html.Section("objective", title, [_nothing_yet(run)])
    layers = {number: _curves(run, f"objective_layer_{number}") for number in _objectives(run)}
    if not layers:
        text = "No layer has an objective: training minimised the task's loss alone."
        return html.Section("objective", title, [html.Paragraph(text)])
    ends = [
        f"Layer {number}: {format_number(_mean_at(curves, 0))} to {format_number(_mean_at(curves, -1))}."
        for number, curves in layers.items()
    ]
    picture = html.Picture(
        data_uri(plots.objective_curves(layers, unit=run.unit)),
        f"Line chart of the objective J over the {run.unit}s, on a symmetric logarithmic axis. "
        f"{' '.join(ends)}",
        "The auxiliary objective J of each layer; for Primal-Attention, the KSVD objective. Training adds "
        "its weighted square to the task's loss, which pulls J to 0 from either side. J = 0 is necessary for "
        "a singular value decomposition of the kernel, but not sufficient.",
        wide=len(run.seeds) > 1,
    )
    return html.Section("objective", title, [html.Pictures([picture])])


def _objectives(run: RunRecord) -> list[int]:
    """The layers that have an objective."""
    keys = {key for record in run.seeds for row in record.metrics for key in row}
    return sorted(int(match[1]) for key in keys if (match := re.fullmatch(r"objective_layer_(\d+)", key)))


def _curves(run: RunRecord, key: str) -> dict[int, Curve]:
    found = {record.seed: record.curve(key) for record in run.seeds}
    return {seed: curve for seed, curve in found.items() if curve is not None}


def _mean_at(curves: dict[int, Curve], position: int) -> float:
    return float(np.mean([curve[1][position] for curve in curves.values()]))


def _table(run: RunRecord, record: SeedRecord) -> html.Table:
    left = {"epoch"} if record.unit == "step" else set()  # only a count of the rows
    columns = [key for key in dict.fromkeys(key for row in record.metrics for key in row) if key not in left]
    count = len(record.metrics)
    chosen = sorted(set(np.linspace(0, count - 1, min(count, ROW_LIMIT)).round().astype(int).tolist()))
    left_out = (
        f": {len(chosen)} of {count} rows, all of them in seed-{record.seed}/metrics.csv"
        if len(chosen) < count
        else ""
    )
    rows = [[format_number(record.metrics[index].get(key)) for key in columns] for index in chosen]
    head = [column_name(key, run.selection_split) for key in columns]
    return html.Table(head, rows, f"Seed {record.seed}{left_out}", numbers=True)


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
