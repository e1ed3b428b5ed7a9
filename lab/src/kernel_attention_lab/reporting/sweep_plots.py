"""Pictures of a sweep: the metric against one key, against two, and in the order of the points."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_attention_lab.reporting.figures import (
    INK,
    MUTED,
    PALETTE,
    report_style,
    whole_numbers,
)
from kernel_attention_lab.reporting.formats import is_share
from kernel_attention_lab.reporting.sweep_record import SweepPoint, SweepRecord, key_text

_LONGEST = 24  # characters of a value at an axis


@report_style()
def course(record: SweepRecord) -> Figure:
    """The value of every complete point by its number, and the best one so far."""
    points = [point for point in record.points if point.value is not None]
    figure = Figure(figsize=(6.8, 3.0))
    axis = figure.subplots()
    values = _scaled(record, points)
    numbers = [point.number for point in points]
    best = (np.maximum if record.larger_is_better else np.minimum).accumulate(values)
    axis.plot(numbers, values, "o", color=MUTED, markersize=4, label="point")
    axis.step(numbers, best, where="post", color=PALETTE[0], label="best so far")
    axis.xaxis.set_major_locator(whole_numbers())
    axis.set_xlabel("point")
    axis.set_ylabel(_axis_text(record))
    axis.legend()
    return figure


@report_style()
def against_key(record: SweepRecord, key: str) -> Figure:
    """The value of every complete point against one key; the means where it has values."""
    points = [point for point in record.points if point.value is not None]
    figure = Figure(figsize=(5.0, 3.2))
    axis = figure.subplots()
    places, values = _places(record, key, points), _scaled(record, points)
    axis.plot(places, values, "o", color=MUTED, markersize=4, alpha=0.7)
    if isinstance(record.space[key], list):
        levels = np.unique(places)
        means = [values[places == level].mean() for level in levels]
        is_ordered = all(isinstance(value, int | float) for value in record.space[key])
        line = "solid" if is_ordered else "none"
        axis.plot(levels, means, color=PALETTE[0], marker="D", markersize=5, linestyle=line)
    _set_axis(record, key, axis, "x")
    axis.set_ylabel(_axis_text(record))
    return figure


@report_style()
def against_two_keys(record: SweepRecord, first: str, second: str) -> Figure:
    """The metric over two keys: means in cells where both have values, else a dot for every point."""
    figure = Figure(figsize=(5.2, 3.6))
    axis = figure.subplots()
    points = [point for point in record.points if point.value is not None]
    values = _scaled(record, points)
    across, up = _places(record, second, points), _places(record, first, points)
    if isinstance(record.space[first], list) and isinstance(record.space[second], list):
        cells = cell_means(record, first, second)
        shown: Any = axis.imshow(cells, origin="lower", aspect="auto", cmap="viridis")
        _write_cells(axis, cells)
        axis.grid(False)
    else:
        shown = axis.scatter(across, up, c=values, cmap="viridis", s=34, edgecolors=INK, linewidths=0.4)
    _set_axis(record, second, axis, "x")
    _set_axis(record, first, axis, "y")
    bar = figure.colorbar(shown, ax=axis)
    bar.set_label(_axis_text(record))
    return figure


def cell_means(record: SweepRecord, first: str, second: str) -> np.ndarray:
    """Means over the complete points, (values of ``first``, values of ``second``); NaN where none is."""
    points = [point for point in record.points if point.value is not None]
    values = _scaled(record, points)
    rows, columns = _places(record, first, points), _places(record, second, points)
    cells = np.full((len(record.space[first]), len(record.space[second])), np.nan)
    for row, column in {*zip(rows.tolist(), columns.tolist(), strict=True)}:
        cells[int(row), int(column)] = values[(rows == row) & (columns == column)].mean()
    return cells


def _write_cells(axis: Axes, cells: np.ndarray) -> None:
    """The number in every cell, where there are few enough of them to read."""
    if cells.size > 60:
        return
    low, high = np.nanmin(cells), np.nanmax(cells)
    for (row, column), value in np.ndenumerate(cells):
        if np.isfinite(value):
            is_light = high > low and (value - low) / (high - low) > 0.6
            color = INK if is_light else "white"
            axis.text(column, row, f"{value:.4g}", ha="center", va="center", fontsize=8, color=color)


def _places(record: SweepRecord, key: str, points: Sequence[SweepPoint]) -> np.ndarray:
    """Where points are on a key's axis: its number, or the index among the key's values."""
    entry = record.space[key]
    if isinstance(entry, Mapping):
        return np.array([float(point.keys[key]) for point in points])
    labels = [json.dumps(value) for value in entry]
    return np.array([labels.index(json.dumps(point.keys[key])) for point in points])


def _scaled(record: SweepRecord, points: Sequence[SweepPoint]) -> np.ndarray:
    """The values of points, shares in per cent."""
    values = np.array([point.value for point in points], dtype=float)
    return 100 * values if is_share(record.metric) else values


def _axis_text(record: SweepRecord) -> str:
    return f"{record.metric_text}{' (%)' if is_share(record.metric) else ''}"


def _set_axis(record: SweepRecord, key: str, axis: Axes, which: str) -> None:
    entry: Any = record.space[key]
    getattr(axis, f"set_{which}label")(key)
    if isinstance(entry, Mapping):
        if entry.get("log"):
            getattr(axis, f"set_{which}scale")("log")
        return
    texts = [key_text(key, value) for value in entry]
    short = [text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…" for text in texts]
    options = {"rotation": 20, "ha": "right"} if which == "x" and max(map(len, short)) > 8 else {}
    getattr(axis, f"set_{which}ticks")(range(len(entry)), short, **options)
    getattr(axis, f"set_{which}lim")(-0.5, len(entry) - 0.5)
