"""Pictures of several runs: the figure of every seed, and the curves by epoch or step."""

from __future__ import annotations

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.curve_sections import QUANTITIES
from kernel_attention_lab.reporting.figures import (
    INK,
    data_uri,
    legend_below,
    markers,
    report_style,
    seed_styles,
    whole_numbers,
)
from kernel_attention_lab.reporting.formats import format_metric, is_share, metric_name
from kernel_attention_lab.reporting.records import Curve, RunRecord
from kernel_attention_lab.reporting.run_comparison import RunComparison


def comparison_pictures(comparison: RunComparison) -> list[html.Picture]:
    """The seeds, and one picture for each quantity that at least two runs followed on evaluated cases."""
    metric = metric_name(comparison.metric)
    pictures = []
    if comparison.seeds:
        means = "; ".join(
            f"{each.name} {format_metric(comparison.metric, each.mean)}" for each in comparison.runs
        )
        pictures.append(
            html.Picture(
                data_uri(_seeds(comparison)), f"Dot chart of the test {metric}. Means: {means}.",
                f"Test {metric}: a dot for every seed, a bar for the mean",
            )
        )  # fmt: skip
    for name in QUANTITIES:
        curves = {each.name: curve for each in comparison.runs if (curve := _curve(each.run, name))}
        units = {each.run.unit for each in comparison.runs if each.name in curves}
        if len(curves) < 2 or len(units) > 1:
            continue
        unit = units.pop()
        ends = "; ".join(f"{run} {format_metric(name, curve[1][-1])}" for run, curve in curves.items())
        pictures.append(
            html.Picture(
                data_uri(_curves(curves, name, unit)),
                f"Line chart of the {metric_name(name)} on the cases that select the weights. Ends: {ends}.",
                f"{metric_name(name).capitalize()} on the cases that select the weights, by {unit}: the mean "
                "over the seeds",
            )
        )
    return pictures


def _curve(run: RunRecord, name: str) -> Curve | None:
    """The mean over the seeds, at the epochs or steps that all of them have."""
    found = [curve for record in run.seeds if (curve := record.curve(f"val_{name}")) is not None]
    if not found:
        return None
    rows = [dict(zip(curve[0].tolist(), curve[1].tolist(), strict=True)) for curve in found]
    places = sorted(set.intersection(*map(set, rows)))
    return (np.array(places), np.array([np.mean([row[place] for row in rows]) for place in places]))


@report_style()
def _seeds(comparison: RunComparison) -> Figure:
    figure = Figure(figsize=(5.2, 1.2 + 0.4 * len(comparison.runs)))
    axis = figure.subplots()
    styles = seed_styles(comparison.seeds)
    for place, each in enumerate(comparison.runs):
        for seed, value in each.values.items():
            axis.plot(value, place, marker="o", linestyle="", color=styles[seed]["color"])
        if each.mean is not None:
            axis.plot(each.mean, place, marker="|", markersize=18, linestyle="", color=INK)
    axis.set_yticks(range(len(comparison.runs)), [each.name[-40:] for each in comparison.runs])
    axis.invert_yaxis()
    axis.set_xlabel(metric_name(comparison.metric))
    if is_share(comparison.metric):
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure


@report_style()
def _curves(curves: dict[str, Curve], name: str, unit: str) -> Figure:
    figure = Figure(figsize=(5.2, 3.5))
    axis = figure.subplots()
    styles = seed_styles(range(len(curves)))
    for number, (run, curve) in enumerate(curves.items()):
        axis.plot(*curve, label=run[-40:], **styles[number], **markers(curve[0]))
    axis.set_xlabel(unit)
    axis.xaxis.set_major_locator(whole_numbers())
    axis.set_ylabel(metric_name(name))
    if is_share(name):
        axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    legend_below(figure, axis)
    return figure
