"""The parts of the report that follow the epochs: learning curves and the objective."""

from __future__ import annotations

import re

import numpy as np

from kernel_attention.experiments.reporting import html, plots
from kernel_attention.experiments.reporting.figures import data_uri
from kernel_attention.experiments.reporting.formats import format_metric, format_number, metric_name
from kernel_attention.experiments.reporting.records import Curve, RunRecord, SeedRecord

ROW_LIMIT = 30  # epochs listed for each seed; all of them stand in metrics.csv
QUANTITIES = ("loss", "accuracy", "rmse", "r2")


def curves_section(run: RunRecord) -> html.Section:
    """Loss and accuracy (RMSE and R² for regression) of training and validation over the epochs."""
    charts = [chart for name in QUANTITIES if (chart := _learning_chart(run, name))]
    if not charts:
        return html.Section("curves", "Learning curves", html.paragraph("No epoch has been completed yet."))
    body = html.pictures(charts, pair=len(run.seeds) == 1)
    tables = "\n".join(_epoch_table(record) for record in run.seeds if record.metrics)
    return html.Section(
        "curves", "Learning curves", body + html.folded("The numbers behind the curves", tables)
    )


def _learning_chart(run: RunRecord, name: str) -> html.Picture | None:
    train = _curves(run, f"train_{name}")
    evaluated = _curves(run, f"val_{name}")
    if not train and not evaluated:
        return None
    # Under the paper's protocol the epoch is selected on the test split, which must not pass as another.
    where = "test split" if run.protocol == "paper" else "validation"
    figure = plots.learning_curves(
        train,
        evaluated,
        metric_name(name),
        evaluated_label=where,
        percent=name == "accuracy",
        selected_epochs={
            record.seed: record.evaluation["best_epoch"]
            for record in run.seeds
            if record.evaluation and isinstance(record.evaluation.get("best_epoch"), int)
        },
    )
    ends = [
        _ending(name, words, curves) for words, curves in (("training", train), (where, evaluated)) if curves
    ]
    seeds = f" for {len(run.seeds)} seeds" if len(run.seeds) > 1 else ""
    alt = f"Line chart of the {metric_name(name)} over the epochs{seeds}. {' '.join(ends)}"
    return html.Picture(
        data_uri(figure), alt, f"{_capital(metric_name(name))} by epoch. {_caption(run, name, where)}"
    )


def _caption(run: RunRecord, name: str, where: str) -> str:
    parts = []
    if name == "loss":
        parts.append("The task's loss alone, without the objective.")
    if where == "test split":
        parts.append(
            "Under the protocol paper the epoch is selected on the test split, which these curves show."
        )
    if len(run.seeds) > 1:
        parts.append("One light line a seed, their mean dark.")
    return " ".join(parts)


def _ending(name: str, words: str, curves: dict[int, Curve]) -> str:
    last = float(np.mean([curve[1][-1] for curve in curves.values()]))
    return f"{_capital(words)} ends at {format_metric(name, last)}{' on average' if len(curves) > 1 else ''}."


def objective_section(run: RunRecord) -> html.Section:
    """The auxiliary objective J of each layer over the epochs."""
    title = "Objective"
    if not any(record.metrics for record in run.seeds):
        return html.Section("objective", title, html.paragraph("No epoch has been completed yet."))
    keys = {key for record in run.seeds for row in record.metrics for key in row}
    numbers = sorted(int(match[1]) for key in keys if (match := re.fullmatch(r"objective_layer_(\d+)", key)))
    layers = {number: _curves(run, f"objective_layer_{number}") for number in numbers}
    if not layers:
        text = "This mechanism has no objective: training minimised the task's loss alone."
        return html.Section("objective", title, html.paragraph(text))
    ends = [
        f"Layer {number}: {format_number(_mean_at(curves, 0))} to {format_number(_mean_at(curves, -1))}."
        for number, curves in layers.items()
    ]
    picture = html.Picture(
        data_uri(plots.objective_curves(layers)),
        f"Line chart of the objective J over the epochs, on a symmetric logarithmic axis. {' '.join(ends)}",
        "The auxiliary objective J of each layer; for Primal-Attention the KSVD objective. Training adds its "
        "weighted square to the task's loss, which draws J to 0 from either side. J = 0 is necessary for a "
        "singular value decomposition of the kernel, not sufficient.",
    )
    return html.Section("objective", title, html.pictures([picture]))


def _curves(run: RunRecord, key: str) -> dict[int, Curve]:
    found = {record.seed: record.curve(key) for record in run.seeds}
    return {seed: curve for seed, curve in found.items() if curve is not None}


def _mean_at(curves: dict[int, Curve], position: int) -> float:
    return float(np.mean([curve[1][position] for curve in curves.values()]))


def _epoch_table(record: SeedRecord) -> str:
    columns = list(dict.fromkeys(key for row in record.metrics for key in row))
    count = len(record.metrics)
    chosen = sorted(set(np.linspace(0, count - 1, min(count, ROW_LIMIT)).round().astype(int).tolist()))
    left_out = (
        f": {len(chosen)} of {count} epochs, all of them in seed-{record.seed}/metrics.csv"
        if len(chosen) < count
        else ""
    )
    rows = [[format_number(record.metrics[index].get(key)) for key in columns] for index in chosen]
    return html.table(
        [key.replace("_", " ") for key in columns], rows, f"Seed {record.seed}{left_out}", numbers=True
    )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
