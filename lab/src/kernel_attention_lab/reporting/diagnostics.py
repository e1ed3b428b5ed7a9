"""The section of the report that ``analyze`` adds: what the attention of each layer does, with its maps."""

from __future__ import annotations

import base64
import io
import math
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from PIL import Image

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.diagnostic_plots import (
    HEAD_LIMIT,
    LABELS,
    MAP_LIMIT,
    gamma_figure,
    maps_figure,
    measures_figure,
    over_training_figure,
    select_maps,
    shown_maps,
)
from kernel_attention_lab.reporting.figures import data_uri
from kernel_attention_lab.reporting.formats import layer_name, sentence
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.reporting.tables import TABLES, diagnostics_rows

LEVELS = 200  # of the 256 colours of viridis some are alike in 8 bits; these differ
CELL_LIMIT = 600_000  # of all maps together, for the size of the page


def diagnostics_section(run: RunRecord) -> html.Section | None:
    """Tables and figures of ``seed-K/diagnostics.json``; None for a run that was not analysed."""
    records = [record for record in run.seeds if record.diagnostics]
    if not records:
        return None
    first, *others = records
    pieces = _pieces(run, first)
    viewer = map_viewer(shown_maps(_maps(run, first)))
    if viewer is not None:
        pieces.insert(1, viewer)
    pieces += [html.Folded(f"Seed {record.seed}", _pieces(run, record)) for record in others]
    return html.Section("diagnostics", "What the attention does", [*pieces, *_explanation(records)])


def _pieces(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    layers = _layers(record)
    note = str((record.diagnostics or {}).get("note") or "")
    said = f"Means over sequences and heads, seed {record.seed}. {sentence(note)}".strip()
    tables = [
        html.Table(*found, f"{subject}. {said}", numbers=True)
        for subject, headings in TABLES.items()
        if len((found := diagnostics_rows(layers, headings))[0]) > 1
    ]
    remarks = dict.fromkeys(
        f"{layer_name(str(layer['name']))}: {text}" for layer in layers for text in layer["notes"]
    )
    return [
        html.Pictures(_pictures(run, record)),
        *tables,
        *_over_training(record),
        *(html.Paragraph(sentence(text), muted=True) for text in remarks),
    ]


def _explanation(records: Sequence[SeedRecord]) -> list[html.Piece]:
    """The meaning of the numbers shown."""
    measured = {key for record in records for layer in _layers(record) for key in layer["summary"]}
    said = []
    names = {"projection_error": "J_proj", "gamma_spread": "gamma"}
    softmax = [name for key, name in names.items() if key in measured]
    if softmax:
        verb = "is that" if len(softmax) == 1 else "are those"
        said.append(
            f"{' and '.join(softmax)} {verb} of softmax attention with the layer's queries, keys and values."
        )
    if "released_projection_error" in measured:
        said.append(
            "J_proj is equation 13 of the kernel-PCA paper: the mean of ‖φ(q)‖² less that of ‖h‖². Its "
            "released form is the logarithm of what the authors' code averages, for standardised queries and "
            "keys (docs/diagnostics.md)."
        )
    if "head_distance" in measured:
        said.append(
            "Head distances are L2 distances between the heads' attention matrices, or between their "
            "outputs: by row, averaged over the rows, or whole (Frobenius norm)."
        )
    said.append("All numbers, by sequence and head, are in diagnostics.npz in the folder of each seed.")
    return [html.Paragraph(" ".join(said), muted=True)]


def _over_training(record: SeedRecord) -> list[html.Piece]:
    """The course of the figures over training, where ``analyze --over_training`` measured it."""
    course = (record.over_training or {}).get("epochs", [])
    epochs = [entry["epoch"] for entry in course]
    figure = over_training_figure(course, record.unit, record.places(epochs))
    if figure is None:
        return []
    untrained = " The first point is the untrained model." if epochs[0] == 0 else ""
    picture = html.Picture(
        data_uri(figure),
        f"Line charts of the figures of every layer over training, at {len(epochs)} {record.unit}s.",
        f"The same figures over training, seed {record.seed}: one line per layer, the mean of the layers "
        f"dashed.{untrained}",
        wide=True,
    )
    return [html.Pictures([picture])]


def _layers(record: SeedRecord) -> Sequence[Mapping[str, Any]]:
    return (record.diagnostics or {}).get("layers", [])


def _pictures(run: RunRecord, record: SeedRecord) -> list[html.Picture]:
    pictures = []
    layers = _layers(record)
    figure = measures_figure(layers)
    if figure is not None:
        shown = {key for layer in layers for key in layer["by_head"]}
        has_curves = any(layer.get("explained_variance") for layer in layers)
        panels = [LABELS[key] for key in LABELS if key in shown]
        said = [f"Seed {record.seed}."]
        if has_curves:
            panels.insert(0, "cumulative explained variance")
            said.append(
                "Explained variance of each layer's attention, mean over sequences and heads; the dashed "
                "line is 90 %."
            )
        if shown:
            said.append(
                "In the other charts, a dot is a head (for distances, a pair of heads), the bar their median."
            )
        pictures.append(
            html.Picture(
                data_uri(figure),
                f"Charts by layer: {', '.join(panels)}.",
                " ".join(said),
                wide=True,
            )
        )
    figure = gamma_figure(layers)
    if figure is not None:
        pictures.append(
            html.Picture(
                data_uri(figure),
                "Line charts of the spread of gamma by component, beside the eigenvalue, for every layer.",
                "How constant gamma is, by component in the order of the eigenvalues: medians over sequences "
                "and heads. At an eigenvector the spread is 0. No eigenvalue exceeds 1/N.",
                wide=True,
            )
        )
    maps = _maps(run, record)
    figure = maps_figure(maps)
    if figure is not None:
        heads = max(len(array) for array in maps.values())
        left_out = len(maps) > MAP_LIMIT or heads > HEAD_LIMIT
        shown_part = f"; at most {MAP_LIMIT} maps and {HEAD_LIMIT} heads are shown" if left_out else ""
        pictures.append(
            html.Picture(
                data_uri(figure),
                "Attention maps of one sequence by layer and head.",
                "The first sequence: attention with a row per query and a column per key, or scores with a "
                f"row per token and a column per component. Each map has its own scale{shown_part}.",
                wide=heads > 3,
            )
        )
    return pictures


def _maps(run: RunRecord, record: SeedRecord) -> dict[str, np.ndarray]:
    """The maps in ``diagnostics.npz``; empty where it is missing or damaged."""
    path = run.folder.diagnostics_arrays_path(record.seed)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return select_maps({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError):
        return {}


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
