"""Pictures of diagnosed attention layers, also over training: functions from data to a ``Figure``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from kernel_attention.analysis import DiagnosticsReport
from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    PALETTE,
    free_panels,
    image_grid,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    save_figure,
    show_image,
    whole_numbers,
)
from kernel_attention_lab.reporting.formats import layer_name

REACHED = 0.999  # curves of the explained variance end here
HEAD_LIMIT, MAP_LIMIT = 8, 6  # the numbers of heads and layers in a picture of attention maps
LABELS = {
    "effective_rank": "effective rank",
    "head_distance": "distance between heads",
    "matrix_distance": "distance between heads' matrices",
    "projection_error": "J_proj",
    "released_projection_error": "log J_proj, released form",
    "gamma_relative_spread": "gamma: spread over eigenvalue",
    "objective": "objective J",
}
LAYER_LIMIT = 12  # panels in a picture of gamma
COURSES = {
    "released_projection_error": "log J_proj, released form",
    "projection_error_median": "J_proj (median)",
    "projection_log_length": "log ‖φ(q)‖²",
    "projection_output": "‖h‖²",
    "gamma_relative_spread": "gamma: spread over eigenvalue",
    "gamma_cosine": "gamma: cosine",
    "values_for_90_percent": "singular values for 90 %",
    "effective_rank": "effective rank",
    "matrix_distance": "distance between heads' matrices",
    "output_matrix_distance": "distance between heads' outputs",
    "objective": "objective J",
}
"""The figures of a layer's summary that have a panel, and its title."""


def plot_diagnostics(report: DiagnosticsReport, path: str | Path, what: str = "measures") -> Path:
    """Draw a report to a file. The format follows from its name (.png, .svg, .pdf).

    Args:
        report: from ``kernel_attention.analysis.diagnose``.
        path: the file; an existing one is replaced.
        what: "measures" (explained variance, and every number by layer and head) or "maps" (the attention of
            the first sequence, up to 6 layers and 8 heads).

    Raises:
        InputError: for another ``what``, nothing to draw, or a path that cannot be written.
    """
    if what not in ("measures", "maps"):
        raise unknown("what", what, ("measures", "maps"))
    if what == "measures":
        figure = measures_figure(report.records())
    else:
        figure = maps_figure(select_maps(report.arrays()))
    if figure is None:
        raise InputError(f"what={what!r}: the report holds no data for this picture")
    return save_figure(figure, path)


@report_style()
def measures_figure(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Mean cumulative explained variance by layer, and a panel with one dot per head for every other number.

    Args:
        records: the records of the layers, first to last, see
            ``kernel_attention.analysis.LayerDiagnostics.record``.

    Returns:
        The figure; None where no layer has data for it.
    """
    names = layer_titles(records)
    curves = _curves(records)
    quantities = [key for key in LABELS if any(record["by_head"].get(key) for record in records)]
    count = len(curves) + len(quantities)
    if not count:
        return None
    figure, axes = free_panels(count)
    for axis, (title, by_layer) in zip(axes, curves.items(), strict=False):
        _curve_panel(axis, title, by_layer, len(records))
    for axis, key in zip(axes[len(curves) :], quantities, strict=False):
        _dot_panel(axis, LABELS[key], [record["by_head"].get(key) or [] for record in records], names)
    if curves:
        name_layers(axes[0], names, sorted({place for by_layer in curves.values() for place in by_layer}))
        legend_below(figure, axes[0])
    return figure


@report_style()
def maps_figure(maps: Mapping[str, np.ndarray]) -> Figure | None:
    """Attention or scores of one sequence, one row per layer and one column per head, each on its own scale.

    Args:
        maps: title of a row -> (h, n, m); those of ``shown_maps`` are drawn.
    """
    maps = shown_maps(maps)
    if not maps:
        return None
    columns = max(len(array) for array in maps.values())
    figure, axes = image_grid(len(maps), columns, (1.35 * columns + 0.7, 1.5 * len(maps) + 0.2))
    for row, name in zip(axes, maps, strict=True):
        for unused in row[len(maps[name]) :]:
            unused.remove()
        for head, (axis, map_) in enumerate(zip(row, maps[name], strict=False)):
            show_image(axis, map_, cmap=matplotlib.colormaps["viridis"], aspect="auto")
            axis.set_title(f"head {head}", fontsize=8, fontweight="normal")
        row[0].set_ylabel(_folded(name), fontsize=8, parse_math=False)
    return figure


def shown_maps(maps: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The maps that a page has room for: ``MAP_LIMIT`` evenly spaced rows, the first ``HEAD_LIMIT`` heads."""
    names = list(maps)
    if len(names) > MAP_LIMIT:
        names = [names[round(place)] for place in np.linspace(0, len(names) - 1, MAP_LIMIT)]
    return {name: maps[name][:HEAD_LIMIT] for name in names}


def select_maps(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The attention maps and scores among a report's arrays, (h, n, m) each, by the title of their row."""
    found = {}
    for key, value in arrays.items():
        layer, _, quantity = key.rpartition("/")
        if value.ndim == 3 and np.isfinite(value).all():
            if quantity == "attention_map":
                found[f"{layer_name(layer)}, attention"] = value
            elif quantity.startswith("scores_"):
                found[f"{layer_name(layer)}, {quantity.replace('_', ' ')}"] = value
    return found


def _curves(records: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, np.ndarray]]:
    """Title of a panel -> place of the layer -> its curve."""
    curves: dict[str, dict[int, np.ndarray]] = {}
    for place, record in enumerate(records):
        if record.get("explained_variance"):
            curves.setdefault("attention matrix", {})[place] = np.array(record["explained_variance"])
        for mode, curve in enumerate(record.get("mode_explained_variance") or []):
            curves.setdefault(f"kernel tensor, mode {mode + 1}", {})[place] = np.array(curve)
    return curves


def _curve_panel(axis: Axes, title: str, by_layer: Mapping[int, np.ndarray], layers: int) -> None:
    colors = ordered_colors(layers)
    reached = max(5, *(int(np.searchsorted(curve, REACHED)) + 1 for curve in by_layer.values()))
    for place, curve in by_layer.items():
        shown = curve[:reached]
        axis.plot(np.arange(1, len(shown) + 1), shown, color=colors[place], **markers(shown))
    axis.axhline(0.9, color=MUTED, linewidth=1, linestyle=(0, (4, 3)), zorder=1)
    axis.set(title=title, xlabel="singular values", ylabel="explained variance", ylim=(0, 1.03))
    axis.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axis.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, steps=[1, 2, 5, 10]))


def _dot_panel(
    axis: Axes, label: str, by_layer: Sequence[Sequence[float | None]], names: Sequence[str]
) -> None:
    for place, values in enumerate(by_layer):
        known = [value for value in values if value is not None]
        axis.plot([place] * len(known), known, "o", color=PALETTE[0], markersize=3.5, alpha=0.55)
        if known:
            axis.plot([place - 0.25, place + 0.25], [float(np.median(known))] * 2, color=PALETTE[1])
    scale_for_outliers(
        axis, np.array([value for values in by_layer for value in values if value is not None])
    )
    axis.set(title=label, xlabel="layer", xlim=(-0.6, len(by_layer) - 0.4))
    step = -(-len(names) // 8)
    places = range(0, len(names), step)
    axis.set_xticks(places, [names[place].removeprefix("layer ") for place in places])


def name_layers(axis: Axes, names: Sequence[str], places: Sequence[int]) -> None:
    """Entries of a legend for the layers at these places, by their colours."""
    for place in places:
        is_named = len(names) <= 12 or place in (0, len(names) - 1)  # of many, the first and the last
        label = names[place] if is_named else None
        axis.plot([], [], color=ordered_colors(len(names))[place], label=label)


def scale_for_outliers(axis: Axes, values: np.ndarray) -> None:
    """An axis linear up to the median size and logarithmic beyond, where single values are far larger."""
    if values.size:
        middle = max(float(np.median(np.abs(values))), 1e-12)
        if float(np.abs(values).max()) > 1e3 * middle:
            axis.set_yscale("symlog", linthresh=middle)


def layer_titles(records: Sequence[Mapping[str, Any]]) -> list[str]:
    """``layer K``: the model's number where every layer has one, else the place among those measured."""
    names = [layer_name(str(record["name"])) for record in records]
    if all(name.startswith("layer ") for name in names):
        return names
    return [f"layer {place}" for place in range(len(names))]


def _folded(name: str, width: int = 18) -> str:
    """A long dotted name on several lines, broken at its dots; a comma begins a line of its own."""
    lines = [""]
    for word in re.findall(r"[^.]+\.?", name.replace(", ", "\n")):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += word
    return "\n".join(lines)


# --- over training, and by component ------------------------------------------------------------------------


def plot_over_training(course: Sequence[Mapping[str, Any]], path: str | Path) -> Path:
    """Draw the diagnoses of a seed over training to a file. The format follows from its name.

    Args:
        course: the entries ``epochs`` of ``diagnostics_over_training.json``.
        path: the file; an existing one is replaced.

    Raises:
        InputError: for a course without any figure, or a path that cannot be written.
    """
    figure = over_training_figure(course)
    if figure is None:
        raise InputError("course holds no figures to draw")
    return save_figure(figure, path)


@report_style()
def over_training_figure(
    course: Sequence[Mapping[str, Any]], unit: str = "epoch", places: Sequence[int] | None = None
) -> Figure | None:
    """A panel for every figure: one line per layer, the mean of the layers dashed.

    Args:
        course: for every copy of the weights, ``epoch`` and the records of its ``layers``.
        unit: of the horizontal axis.
        places: where each copy stands on it; None: its epoch.

    Returns:
        The figure; None where no layer has data for it.
    """
    if not course:
        return None
    at = np.array([entry["epoch"] for entry in course] if places is None else places)
    names = layer_titles(course[0]["layers"])
    lines = {key: _summaries(course, key) for key in COURSES}
    shown = {key: values for key, values in lines.items() if np.isfinite(values).any()}
    if not shown:
        return None
    figure, axes = free_panels(len(shown))
    colors = ordered_colors(len(names))
    for axis, (key, values) in zip(axes, shown.items(), strict=True):
        for layer, color in zip(values.T, colors, strict=True):
            axis.plot(at, layer, color=color, linewidth=1.4, **markers(at))
        if values.shape[1] > 1:
            has_all = np.isfinite(values).all(axis=0)
            if has_all.sum() > 1:
                mean = values[:, has_all].mean(axis=1)
                axis.plot(at, mean, color=INK, linewidth=2, linestyle=(0, (4, 2)))
        _decades(axis, values[np.isfinite(values)])
        axis.set(title=COURSES[key], xlabel=unit)
        axis.xaxis.set_major_locator(whole_numbers())
    name_layers(axes[0], names, range(len(names)))
    if len(names) > 1:
        axes[0].plot([], [], color=INK, linewidth=2, linestyle=(0, (4, 2)), label="mean of the layers")
    legend_below(figure, axes[0])
    return figure


@report_style()
def gamma_figure(records: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Spread and deviation of gamma by component, beside the eigenvalue: a panel for every layer.

    Args:
        records: the records of the layers; those with ``gamma`` are drawn, at most ``LAYER_LIMIT`` evenly
            spaced ones. Components are ordered by their eigenvalue.

    Returns:
        The figure; None where no layer has gamma.
    """
    titles = layer_titles(records)
    found = [
        (title, record["gamma"]) for title, record in zip(titles, records, strict=True) if "gamma" in record
    ]
    if len(found) > LAYER_LIMIT:
        found = [found[round(place)] for place in np.linspace(0, len(found) - 1, LAYER_LIMIT)]
    if not found:
        return None
    figure, axes = panel_grid(len(found), height=2.6)
    for axis, (title, gamma) in zip(axes, found, strict=True):
        parts = {key: np.array([np.nan if v is None else v for v in values]) for key, values in gamma.items()}
        order = np.argsort(-np.nan_to_num(parts["eigenvalue"]), kind="stable")
        at = np.arange(1, len(order) + 1)
        axis.plot(at, parts["eigenvalue"][order], color=PALETTE[0], label="eigenvalue |λ|", **markers(at))
        axis.plot(at, parts["spread"][order], color=PALETTE[1], label="mean of |γᵢ − γⱼ|", **markers(at))
        axis.plot(
            at, parts["deviation"][order], color=MUTED, linewidth=1.1, linestyle=(0, (3, 2)),
            label="its deviation over the pairs",
        )  # fmt: skip
        axis.set_title(title, parse_math=False)
        axis.set_yscale("log")
        axis.set_xlabel("component")
        axis.xaxis.set_major_locator(whole_numbers())
    legend_below(figure, axes[0])
    return figure


def _summaries(course: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The figure of every layer by copy, (copies, layers); NaN where a layer has none."""
    rows = [[layer["summary"].get(key, np.nan) for layer in entry["layers"]] for entry in course]
    return np.array(rows, dtype=float)


def _decades(axis: Axes, values: np.ndarray) -> None:
    """A logarithmic axis for positive values of several decades."""
    if values.min() > 0 and values.max() > 30 * values.min():
        axis.set_yscale("log")
    else:
        scale_for_outliers(axis, values)
