"""Pictures of training and of its result: pure functions from data to a matplotlib ``Figure``.

Figures are built without pyplot. So no window system is needed, no figure stays registered, and the caller's
matplotlib settings neither change the pictures nor are changed by them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter, SymmetricalLogLocator

from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    PALETTE,
    RULE,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    seed_styles,
    whole_numbers,
)

Curve = tuple[np.ndarray, np.ndarray]  # epochs or steps, and values, (rows,) each
Curves = Mapping[int, Curve]  # by seed

COUNT_LIMIT = 20  # a confusion matrix shows its counts up to this number of classes
NAME_LIMIT = 60  # and the names up to this one


@report_style()
def learning_curves(
    train: Curves,
    evaluated: Curves,
    label: str,
    *,
    evaluated_label: str = "validation",
    unit: str = "epoch",
    percent: bool = False,
    selected: Mapping[int, int] | None = None,
) -> Figure:
    """A quantity over the epochs or steps.

    One seed: training and validation in one panel, with the selected epoch marked. Several seeds: a panel for
    each split, with one light line per seed and their mean in dark.

    Args:
        train: seed -> (epochs or steps, values), (rows,) each; may be empty where ``evaluated`` is not.
        evaluated: the same on the split that selects the weights; may be empty where ``train`` is not.
        label: what the vertical axis shows.
        evaluated_label: the name of that split.
        unit: the unit of training, "epoch" or "step".
        percent: whether values are fractions to be shown as percentages.
        selected: seed -> the epoch or step whose weights were kept.
    """
    seeds = sorted({*train, *evaluated})
    panels = [
        (name, curves) for name, curves in (("training", train), (evaluated_label, evaluated)) if curves
    ]
    if len(seeds) == 1:
        figure, axes = _one_seed(panels, (selected or {}).get(seeds[0]), unit)
    else:
        figure = Figure(figsize=(5.2 * len(panels), 3.5))
        axes = list(figure.subplots(1, len(panels), sharey=True, squeeze=False)[0])
        for axis, (name, curves) in zip(axes, panels, strict=True):
            axis.set_title(name)
            _many_seeds(axis, curves, seed_styles(seeds))
        legend_below(figure, axes[0])
    values = np.concatenate([curve[1] for _, curves in panels for curve in curves.values()])
    for axis in axes:
        _time_axis(axis, unit)
        if percent:
            axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=None))
        elif _spans_decades(values):
            axis.set_yscale("log")
            axis.yaxis.set_major_formatter(FuncFormatter(_plain_power))
    axes[0].set_ylabel(label)
    return figure


@report_style()
def objective_curves(layers: Mapping[int, Curves], unit: str = "epoch") -> Figure:
    """The objective J of each layer by epoch or step, on an axis linear around 0 and logarithmic beyond.

    Args:
        layers: layer -> seed -> (epochs or steps, J), (rows,) each.
        unit: the unit of training, "epoch" or "step".
    """
    seeds = sorted({seed for curves in layers.values() for seed in curves})
    if len(seeds) == 1:
        figure = Figure(figsize=(5.2, 3.3))
        axes = [figure.subplots()]
        colors = ordered_colors(len(layers)) if len(layers) > len(PALETTE) else PALETTE
        for color, (layer, curves) in zip(colors, sorted(layers.items()), strict=False):
            curve = curves[seeds[0]]
            axes[0].plot(*curve, color=color, label=f"layer {layer}", **markers(curve[0]))
        axes[0].legend(loc="best", ncols=2 if len(layers) > 4 else 1)
    else:
        figure, axes = panel_grid(len(layers), height=3.3)
        for axis, (layer, curves) in zip(axes, sorted(layers.items()), strict=True):
            axis.set_title(f"layer {layer}")
            _many_seeds(axis, curves, seed_styles(seeds))
        legend_below(figure, axes[0])
    values = np.concatenate([curve[1] for curves in layers.values() for curve in curves.values()])
    threshold = _linear_range(values)
    for axis in axes:
        axis.set_yscale("symlog", linthresh=threshold, linscale=0.6)
        axis.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axis.yaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_major_formatter(FuncFormatter(_plain_power))
        axis.axhline(0, color=MUTED, linewidth=1, zorder=1)
        _time_axis(axis, unit)
    axes[0].set_ylabel("objective J (symmetric log)")
    return figure


@report_style()
def confusion_matrix(counts: np.ndarray, class_names: Sequence[str], percent: bool = False) -> Figure:
    """Counts of (true, predicted) pairs, coloured by the share of the true class.

    Args:
        counts: (classes, classes), rows are the true classes.
        class_names: one name per class; shown up to ``NAME_LIMIT`` classes, counts up to ``COUNT_LIMIT``.
        percent: write the shares of the true class instead of the counts, in whole %.
    """
    classes = len(counts)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    names = [_shorten(name) for name in class_names] if classes <= NAME_LIMIT else []
    figure = Figure(figsize=_matrix_size(classes, names))
    axis = figure.subplots()
    blues = LinearSegmentedColormap.from_list("share", ["#ffffff", "#9ecae9", "#0072B2", "#06304f"])
    image = axis.imshow(shares, cmap=blues, vmin=0, vmax=1, interpolation="nearest")
    axis.grid(False)
    axis.spines[["top", "right"]].set_visible(True)
    axis.set(xlabel="predicted class", ylabel="true class")
    if names:
        # parse_math: a class may have the name "$x$", which is not a formula.
        text: dict[str, Any] = {"fontsize": 9 if classes <= COUNT_LIMIT else 6.5, "parse_math": False}
        axis.set_yticks(range(classes), names, **text)
        axis.set_xticks(range(classes), names, rotation=90 if _crowded(names) else 0, **text)
    if classes <= COUNT_LIMIT:
        _write_counts(axis, (100 * shares).round().astype(int) if percent else counts, shares)
    bar = figure.colorbar(image, ax=axis, shrink=0.9, pad=0.02, aspect=28)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bar.ax.set_ylabel("share of the true class")
    return figure


def _one_seed(
    panels: Sequence[tuple[str, Curves]], selected: int | None, unit: str
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(5.2, 3.3))
    axis = figure.subplots()
    for name, curves in panels:
        color = PALETTE[0] if name == "training" else PALETTE[1]
        for curve in curves.values():
            axis.plot(*curve, color=color, label=name, **markers(curve[0]))
    if selected is not None:
        label = f"selected {unit} {selected}"
        axis.axvline(selected, color=MUTED, linewidth=1.1, linestyle=(0, (2, 2)), label=label)
    axis.legend(loc="best")
    return figure, [axis]


def _many_seeds(axis: Axes, curves: Curves, styles: Mapping[int, Mapping[str, Any]]) -> None:
    for seed, curve in sorted(curves.items()):
        axis.plot(*curve, **styles[seed], alpha=0.6, linewidth=1.2, label=f"seed {seed}", **markers(curve[0]))
    if len(curves) > 1:
        epochs, mean = _mean_curve(list(curves.values()))
        axis.plot(epochs, mean, color=INK, linewidth=2, label="mean", **markers(epochs))


def _mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean over the epochs that every curve has, so that an unfinished seed does not change the mean."""
    rows = [dict(zip(curve[0].tolist(), curve[1].tolist(), strict=True)) for curve in curves]
    epochs = sorted(set.intersection(*(set(row) for row in rows)))
    means = [float(np.mean([row[epoch] for row in rows])) for epoch in epochs]
    return np.array(epochs), np.array(means)


def _time_axis(axis: Axes, unit: str) -> None:
    axis.set_xlabel(unit)
    axis.xaxis.set_major_locator(whole_numbers())


def _spans_decades(values: np.ndarray) -> bool:
    """True where all values are positive and differ by more than a factor of 30: the axis is logarithmic."""
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0 and values.max() / values.min() > 30)


def _linear_range(values: np.ndarray) -> float:
    """The half-width of a symlog axis's linear part: a power of ten near the smallest values that matter."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)])
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


def _crowded(names: Sequence[str]) -> bool:
    """Return whether names would touch if written side by side below the columns."""
    return len(names) * max(len(name) for name in names) > 40 and max(len(name) for name in names) > 2


def _matrix_size(classes: int, names: Sequence[str]) -> tuple[float, float]:
    """Width and height in inches, for cells that hold a count, the names, the axis titles and the bar."""
    cells = min(max(2.8, (0.45 if classes <= COUNT_LIMIT else 0.24) * classes), 7.2)
    letter = 0.082 if classes <= COUNT_LIMIT else 0.06
    longest = letter * max((len(name) for name in names), default=3)
    below = longest if names and _crowded(names) else 0.15
    return cells + longest + 1.55, cells + below + 0.6


def _write_counts(axis: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
    edges = np.arange(len(counts) - 1) + 0.5
    axis.set_xticks(edges, minor=True)
    axis.set_yticks(edges, minor=True)
    axis.grid(True, which="minor", color=RULE, linewidth=0.7)
    axis.tick_params(which="minor", length=0)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else INK
            axis.text(column, row, f"{int(count)}", ha="center", va="center", color=color, fontsize=8)


def _shorten(name: str, limit: int = 22) -> str:
    return name if len(name) <= limit else name[: limit - 1] + "…"
