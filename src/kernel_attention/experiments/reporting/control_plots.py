"""Pictures of a run on decisions: histograms of returns, and moments of an episode."""

from __future__ import annotations

import io
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from kernel_attention.experiments.reporting.figures import MUTED, PALETTE, legend_below, report_style

_BINS = 24
_MOMENTS = 6


@report_style()
def return_histogram(groups: Mapping[str, np.ndarray]) -> Figure:
    """Histograms over common bins, as shares of each group; the first group is filled, the others are lines.

    Args:
        groups: the returns of a group's episodes by its name.
    """
    values = np.concatenate(list(groups.values()))
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    figure = Figure(figsize=(7.4, 3.2))
    axis = figure.subplots()
    for place, (name, found) in enumerate(groups.items()):
        shares = np.histogram(found, edges)[0] / len(found)
        if place == 0:
            axis.stairs(shares, edges, fill=True, color=MUTED, alpha=0.3, label=name)
        else:
            axis.stairs(shares, edges, color=PALETTE[(place - 1) % len(PALETTE)], linewidth=1.8, label=name)
    axis.set(xlabel="return of an episode", ylabel="share of the episodes")
    legend_below(figure, axis)
    return figure


@report_style()
def frame_strip(film: bytes) -> Figure | None:
    """Evenly spaced frames of a GIF in a row; None where it cannot be read."""
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(film), formats=["GIF"]) as opened:
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(opened)]
    except (OSError, ValueError, SyntaxError):
        return None
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), _MOMENTS)).round().astype(int)
    figure = Figure(figsize=(1.7 * len(chosen), 1.75))
    for axis, place in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        axis.imshow(frames[place])
        axis.grid(False)
        axis.set(xticks=[], yticks=[])
    return figure
