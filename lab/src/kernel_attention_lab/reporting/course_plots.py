"""Pictures of diagnoses over training, and of gamma by component: pure functions to a ``Figure``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_attention.errors import InputError
from kernel_attention_lab.reporting.diagnostic_plots import (
    free_panels,
    layer_titles,
    name_layers,
    save_figure,
    scale_for_outliers,
)
from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    PALETTE,
    legend_below,
    markers,
    ordered_colors,
    panel_grid,
    report_style,
    whole_numbers,
)

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
    lines = {key: _lines(course, key) for key in COURSES}
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
        _scale(axis, values[np.isfinite(values)])
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


def _lines(course: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """The figure of every layer by copy, (copies, layers); NaN where a layer has none."""
    rows = [[layer["summary"].get(key, np.nan) for layer in entry["layers"]] for entry in course]
    return np.array(rows, dtype=float)


def _scale(axis: Axes, values: np.ndarray) -> None:
    """A logarithmic axis for positive values of several decades."""
    if values.min() > 0 and values.max() > 30 * values.min():
        axis.set_yscale("log")
    else:
        scale_for_outliers(axis, values)
