"""Attention maps to look into: palette images of one pixel a cell, for the page's viewer."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Mapping

import matplotlib
import numpy as np
from PIL import Image

from kernel_attention.experiments.reporting import html

LEVELS = 200  # of the 256 colours of viridis some are alike in 8 bits; these differ
CELL_LIMIT = 600_000  # of all maps together, for the size of the page


def map_viewer(maps: Mapping[str, np.ndarray]) -> html.MapViewer | None:
    """The viewer of these maps; None without any.

    Maps that together have more than ``CELL_LIMIT`` cells are averaged over square blocks.

    Args:
        maps: title of a layer -> (h, n, m), finite; titles as ``diagnostic_plots.select_maps`` gives them.
    """
    count = sum(len(array) for array in maps.values())
    if not count:
        return None
    limit = math.isqrt(CELL_LIMIT // count)
    colors = matplotlib.colormaps["viridis"](np.linspace(0, 1, LEVELS))[:, :3]
    return html.MapViewer(
        items=[
            _zoomable(title, head, matrix, limit, colors)
            for title, array in maps.items()
            for head, matrix in enumerate(array)
        ],
        scale=_palette_image(np.arange(LEVELS, dtype=np.uint8)[None], colors),
    )


def _zoomable(title: str, head: int, matrix: np.ndarray, limit: int, colors: np.ndarray) -> html.ZoomableMap:
    block = max(1, -(-max(matrix.shape) // limit))
    cells = _block_means(matrix.astype(np.float64), block)
    low, high = float(cells.min()), float(cells.max())
    levels = np.zeros(cells.shape) if high == low else (cells - low) / (high - low) * (LEVELS - 1)
    row, column = ("query", "key") if title.endswith(", attention") else ("token", "component")
    return html.ZoomableMap(
        uri=_palette_image(levels.round().astype(np.uint8), colors),
        title=f"{title}, head {head}",
        row=row,
        column=column,
        low=low,
        high=high,
        shape=(matrix.shape[0], matrix.shape[1]),
        block=block,
    )


def _block_means(matrix: np.ndarray, block: int) -> np.ndarray:
    """Means over blocks of ``block`` x ``block`` entries; the last ones may be smaller."""
    for axis in (0, 1):
        places = np.arange(0, matrix.shape[axis], block)
        counts = np.diff(np.append(places, matrix.shape[axis]))
        matrix = np.add.reduceat(matrix, places, axis=axis) / np.expand_dims(counts, 1 - axis)
    return matrix


def _palette_image(levels: np.ndarray, colors: np.ndarray) -> str:
    image = Image.fromarray(levels)
    image.putpalette(np.round(255 * colors).astype(np.uint8).tobytes())
    buffer = io.BytesIO()
    image.save(buffer, format="png", optimize=True)
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
