"""Learning curves, and the objective of each layer over the training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import cycle

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, SymmetricalLogLocator

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    PALETTE,
    data_uri,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    seed_styles,
    whole_numbers,
)
from kernel_attention_lab.reporting.formats import format_metric, format_number, is_share, metric_name
from kernel_attention_lab.reporting.records import Curve, RunRecord

Curves = Mapping[int, Curve]  # by seed

QUANTITIES = (
    "loss", "accuracy", "mean_iou", "pixel_accuracy", "rmse", "r2", "normalized_score", "episode_return",
)  # fmt: skip


def curves_section(run: RunRecord) -> html.Section:
    """Loss and accuracy (RMSE and R² for regression) of training and validation by epoch or step."""
    charts = [chart for name in QUANTITIES if (chart := _learning_chart(run, name))]
    if not charts:
        return html.Section("curves", "Learning curves", [_nothing_yet(run)])
    pictures = html.Pictures(charts, pair=len(charts) == 2 and len(run.seeds) == 1)
    return html.Section("curves", "Learning curves", [pictures])


def objective_section(run: RunRecord) -> html.Section:
    """The auxiliary objective J of each layer by epoch or step."""
    if not any(record.metrics for record in run.seeds):
        return html.Section("objective", "Objective", [_nothing_yet(run)])
    layers = {number: run.curves(f"objective_layer_{number}") for number in _objectives(run)}
    if not layers:
        text = "No layer has an objective: training minimised the task's loss alone."
        return html.Section("objective", "Objective", [html.Paragraph(text)])
    ends = [
        f"Layer {number}: {format_number(_mean_at(curves, 0))} to {format_number(_mean_at(curves, -1))}."
        for number, curves in layers.items()
    ]
    panels = {f"layer {number}": curves for number, curves in layers.items()}
    figure = curve_figure(panels, "objective J (symmetric log)", unit=run.unit, signed=True)
    picture = html.Picture(
        data_uri(figure),
        f"Line chart of the objective J over the {run.unit}s, on a symmetric logarithmic axis. "
        f"{' '.join(ends)}",
        "The auxiliary objective J of each layer; for Primal-Attention, the KSVD objective. Training adds "
        "its weighted square to the task's loss, which pulls J to 0 from either side. J = 0 is necessary for "
        "a singular value decomposition of the kernel, but not sufficient.",
        wide=len(run.seeds) > 1,
    )
    return html.Section("objective", "Objective", [html.Pictures([picture])])


def _nothing_yet(run: RunRecord) -> html.Piece:
    return html.Paragraph(f"No {run.unit} has been completed yet.")


def _learning_chart(run: RunRecord, name: str) -> html.Picture | None:
    splits = {"training": run.curves(f"train_{name}"), run.selection_split: run.curves(f"val_{name}")}
    splits = {split: curves for split, curves in splits.items() if curves}
    if not splits:
        return None
    label = metric_name(name)
    if name == "loss" and run.task == "language":
        label += " (nats per token)"
    selected = run.seeds[0].selected if len(run.seeds) == 1 else None
    figure = curve_figure(splits, label, unit=run.unit, percent=is_share(name), selected=selected)
    several = len(run.seeds) > 1
    ends = [
        f"{split.capitalize()} ends at {format_metric(name, _mean_at(curves, -1))}"
        f"{' on average' if len(curves) > 1 else ''}."
        for split, curves in splits.items()
    ]
    seeds = f" for {len(run.seeds)} seeds" if several else ""
    alt = f"Line chart of the {metric_name(name)} over the {run.unit}s{seeds}. {' '.join(ends)}"
    caption = [f"{label[:1].upper()}{label[1:]} by {run.unit}.", *_remarks(run, name)]
    return html.Picture(data_uri(figure), alt, " ".join(caption), wide=several)


def _remarks(run: RunRecord, name: str) -> list[str]:
    remarks = []
    if name == "loss" and _objectives(run):
        remarks.append("The task's loss alone, without the objective.")
    if name == "loss" and run.task == "language":
        remarks.append("Its exponential is the perplexity.")
    if run.is_selected_on_test:
        remarks.append(
            f"Under the protocol {run.protocol} the {run.unit} is selected on the {run.selection_split}, "
            "which these curves show."
        )
    if len(run.seeds) > 1:
        remarks.append("One light line per seed, their mean dark.")
    return remarks


def _objectives(run: RunRecord) -> list[int]:
    """The layers that have an objective."""
    keys = {key for record in run.seeds for row in record.metrics for key in row}
    return sorted(int(match[1]) for key in keys if (match := re.fullmatch(r"objective_layer_(\d+)", key)))


def _mean_at(curves: Curves, position: int) -> float:
    return float(np.mean([curve[1][position] for curve in curves.values()]))


# --- the picture --------------------------------------------------------------------------------------------


@report_style()
def curve_figure(
    panels: Mapping[str, Curves],
    label: str,
    *,
    unit: str = "epoch",
    percent: bool = False,
    signed: bool = False,
    selected: int | None = None,
) -> Figure:
    """A quantity over the epochs or steps.

    One seed: all curves in one panel, with the selected epoch marked. Several seeds: a panel for each of
    ``panels``, with one light line per seed and their mean in dark.

    Args:
        panels: title -> seed -> (epochs or steps, values), (rows,) each.
        label: what the vertical axis shows.
        unit: the unit of training, "epoch" or "step".
        percent: whether values are fractions to be shown as percentages.
        signed: whether values of either sign span decades, on an axis linear around 0.
        selected: the epoch or step whose weights were kept.
    """
    seeds = sorted({seed for curves in panels.values() for seed in curves})
    if len(seeds) == 1:
        figure = Figure(figsize=(5.2, 3.3))
        axes = [figure.subplots()]
        colors = ordered_colors(len(panels)) if len(panels) > len(PALETTE) else PALETTE
        for color, (title, curves) in zip(cycle(colors), panels.items(), strict=False):
            curve = curves[seeds[0]]
            axes[0].plot(*curve, color=color, label=title, **markers(curve[0]))
        if selected is not None:
            axes[0].axvline(
                selected,
                color=MUTED,
                linewidth=1.1,
                linestyle=(0, (2, 2)),
                label=f"selected {unit} {selected}",
            )
        axes[0].legend(loc="best", ncols=2 if len(panels) > 4 else 1)
    else:
        figure, axes = panel_grid(len(panels), height=3.4)
        styles = seed_styles(seeds)
        for axis, (title, curves) in zip(axes, panels.items(), strict=True):
            axis.set_title(title)
            for seed, curve in sorted(curves.items()):
                style = styles[seed] | markers(curve[0])
                axis.plot(*curve, alpha=0.6, linewidth=1.2, label=f"seed {seed}", **style)
            if len(curves) > 1:
                mean = mean_curve(list(curves.values()))
                axis.plot(*mean, color=INK, linewidth=2, label="mean", **markers(mean[0]))
        legend_below(figure, axes[0])
    values = np.concatenate([curve[1] for curves in panels.values() for curve in curves.values()])
    for axis in axes:
        _scale(axis, values, percent, signed)
        axis.set_xlabel(unit)
        axis.xaxis.set_major_locator(whole_numbers())
    axes[0].set_ylabel(label)
    return figure


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over the epochs that every curve has, so that an unfinished seed does not change the mean."""
    rows = [dict(zip(curve[0].tolist(), curve[1].tolist(), strict=True)) for curve in curves]
    epochs = sorted(set.intersection(*(set(row) for row in rows)))
    means = [float(np.mean([row[epoch] for row in rows])) for epoch in epochs]
    return np.array(epochs), np.array(means)


def _scale(axis: Axes, values: np.ndarray, percent: bool, signed: bool) -> None:
    """A logarithmic axis where all values are positive and differ by more than a factor of 30."""
    found = values[np.isfinite(values)]
    if percent:
        axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
    elif signed:
        threshold = _linear_range(found)
        axis.set_yscale("symlog", linthresh=threshold, linscale=0.6)
        axis.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(_plain_power))
        axis.axhline(0, color=MUTED, linewidth=1, zorder=1)
    elif found.size and found.min() > 0 and found.max() / found.min() > 30:
        axis.set_yscale("log")
        axis.yaxis.set_major_formatter(FuncFormatter(_plain_power))


def _linear_range(values: np.ndarray) -> float:
    """The half-width of a symlog axis's linear part: a power of ten near the smallest values that matter."""
    sizes = np.abs(values[values != 0])
    if not sizes.size:
        return 1.0
    smallest = max(float(np.quantile(sizes, 0.05)), float(sizes.max()) * 1e-4)
    return float(10.0 ** np.floor(np.log10(smallest)))


def _plain_power(value: float, _position: object = None) -> str:
    size = abs(value)
    if size == 0 or 1e-3 <= size < 1e5:
        text = f"{size:g}"
    else:
        mantissa, exponent = f"{size:.0e}".split("e")
        text = f"{mantissa}e{int(exponent)}"
    return f"−{text}" if value < 0 else text
