"""The common parts of all pictures: style, colours, grids of panels, and embedding into the page."""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import matplotlib
import matplotlib.style
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from kernel_attention.errors import InputError

# Okabe and Ito's colour-blind-safe set, without the yellow, which is invisible on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F5F5F")
DASHES: tuple[Any, ...] = ("solid", (0, (4, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
INK, MUTED, RULE = "#1b1f24", "#57606a", "#d8dee4"
SVG_LIMIT = 180_000  # above this many bytes of SVG, a PNG is tried

STYLE: dict[str, Any] = {
    "axes.axisbelow": True,
    "axes.edgecolor": MUTED,
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "figure.constrained_layout.use": True,
    "font.size": 9,
    "grid.color": RULE,
    "grid.linewidth": 0.7,
    "legend.fontsize": 8.5,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "svg.hashsalt": "kernel-attention",  # the same run gives the same file
    "text.color": INK,
    "xtick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.color": MUTED,
    "ytick.labelcolor": INK,
}

_ENTRY, _LETTER = 0.71, 0.065  # inches of a legend: a line with its spaces, and a letter


@contextmanager
def report_style() -> Iterator[None]:
    """Our settings on top of matplotlib's defaults, whatever the user's settings; restored on exit."""
    with matplotlib.style.context(["default", STYLE]):
        yield


def seed_styles(seeds: Sequence[int]) -> dict[int, dict[str, Any]]:
    """Colour and dashes for each seed, the same in every picture; dashes change when the colours run out."""
    styles = ({"color": color, "linestyle": dashes} for dashes in cycle(DASHES) for color in PALETTE)
    return dict(zip(seeds, islice(styles, len(seeds)), strict=True))


def ordered_colors(count: int) -> list[Any]:
    """Colours for an ordered set, from dark to light, all visible on white."""
    return list(matplotlib.colormaps["viridis"](np.linspace(0.05, 0.82, count)))


def panel_grid(panels: int, height: float, width: float = 6.8) -> tuple[Figure, list[Axes]]:
    """A figure of panels with common axes, at most three in a row; one panel has its own ``width``."""
    columns = min(panels, 3) if panels != 4 else 2
    rows = -(-panels // columns)
    figure = Figure(figsize=(width if columns == 1 else 10.4, height * rows))
    axes = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).ravel().tolist()
    for unused in axes[panels:]:
        unused.remove()
    for axis in axes[max(panels - columns, 0) : panels]:
        axis.tick_params(labelbottom=True)
    return figure, axes[:panels]


def free_panels(count: int) -> tuple[Figure, list[Axes]]:
    """A figure of panels whose axes are their own, at most three in a row."""
    columns = 2 if count == 4 else min(count, 3)
    rows = -(-count // columns)
    figure = Figure(figsize=(3.5 * columns + (3.3 if columns == 1 else 0.0), 3.0 * rows + 0.4))
    axes = figure.subplots(rows, columns, squeeze=False).ravel().tolist()
    for unused in axes[count:]:
        unused.remove()
    return figure, axes[:count]


def image_grid(rows: int, columns: int, size: tuple[float, float]) -> tuple[Figure, Any]:
    """A figure of this size in inches, and its axes for images, (rows, columns)."""
    figure = Figure(figsize=size)
    return figure, figure.subplots(rows, columns, squeeze=False)


def show_image(axis: Axes, image: np.ndarray, **options: Any) -> None:
    """Draw an image, or a map with a colour map, without ticks; ``options`` are those of ``imshow``."""
    axis.imshow(image, interpolation="nearest", **options)
    axis.grid(False)
    axis.set(xticks=[], yticks=[])


def legend_below(figure: Figure, axis: Axes) -> None:
    """One legend for all panels, in rows below them."""
    handles, labels = axis.get_legend_handles_labels()
    if handles:
        width = float(figure.get_figwidth())
        wide = [_ENTRY + _LETTER * len(label) for label in labels]
        fitting = len(wide) if sum(wide) < width else max(int(width / max(wide)), 1)
        rows = -(-len(handles) // min(fitting, 6))
        columns = -(-len(handles) // rows)
        # Long enough for a dashed line to be told from a whole one.
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, handlelength=3.2)


def markers(places: np.ndarray) -> dict[str, Any]:
    """Markers where there are few points; a line of a single point would otherwise be invisible."""
    return {"marker": "o", "markersize": 3.5} if len(places) <= 12 else {}


def whole_numbers() -> MaxNLocator:
    """Ticks at whole numbers, for epochs and indices."""
    return MaxNLocator(nbins=8, integer=True, min_n_ticks=1, steps=[1, 2, 5, 10])


def data_uri(figure: Figure) -> str:
    """The picture as a ``data:`` URI: SVG with outlined letters, or PNG if that is smaller than a large SVG.

    As the source of an ``img`` an SVG runs nothing, loads nothing and shares no ids with the page.
    """
    svg = _render(figure, "svg")
    if len(svg) > SVG_LIMIT and len(png := _render(figure, "png")) < len(svg):
        return "data:image/png;base64," + base64.b64encode(png).decode("ascii")
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode("ascii")


def _render(figure: Figure, kind: str) -> bytes:
    buffer = io.BytesIO()
    with report_style(), warnings.catch_warnings():
        # A class name in a script that the font lacks is drawn as boxes; the tables on the page show it.
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        figure.savefig(buffer, format=kind, dpi=160, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


def save_figure(figure: Figure, path: str | Path) -> Path:
    """Write a figure to a file whose name gives the format; InputError where that cannot be."""
    try:
        with report_style():
            figure.savefig(path, dpi=160)
    except (OSError, ValueError) as error:
        raise InputError(f"path {str(path)!r} cannot be written: {error}") from None
    return Path(path)
