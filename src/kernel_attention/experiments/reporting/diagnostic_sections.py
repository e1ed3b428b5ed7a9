"""The section of the report that ``analyze`` adds: what the attention of each layer does."""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention.experiments.reporting import html
from kernel_attention.experiments.reporting.diagnostic_plots import (
    LABELS,
    MAP_LIMIT,
    maps_figure,
    measures_figure,
    select_maps,
)
from kernel_attention.experiments.reporting.figures import data_uri
from kernel_attention.experiments.reporting.formats import layer_name, sentence
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord
from kernel_attention.experiments.reporting.spectrum_plots import HEAD_LIMIT
from kernel_attention.experiments.reporting.tables import diagnostics_rows


def diagnostics_section(run: RunRecord) -> html.Section | None:
    """Tables and figures of ``seed-K/diagnostics.json``; None for a run that was not analysed."""
    records = [record for record in run.seeds if record.diagnostics]
    if not records:
        return None
    first, *others = records
    pieces = _pieces(run, first)
    pieces += [html.Folded(f"Seed {record.seed}", _pieces(run, record)) for record in others]
    return html.Section("diagnostics", "What the attention does", [*pieces, *_explanation(records)])


def _pieces(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    layers = _layers(record)
    head, rows = diagnostics_rows(layers)
    note = str((record.diagnostics or {}).get("note") or "")
    caption = f"Means over sequences and heads, seed {record.seed}. {sentence(note)}".strip()
    remarks = dict.fromkeys(
        f"{layer_name(str(layer['name']))}: {text}" for layer in layers for text in layer["notes"]
    )
    return [
        html.Pictures(_pictures(run, record)),
        html.Table(head, rows, caption, numbers=True),
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
    if "head_distance" in measured:
        said.append(
            "Head distances are L2 distances between rows of the heads' attention matrices, averaged over "
            "the rows."
        )
    said.append("All numbers, by sequence and head, are in diagnostics.npz in the folder of each seed.")
    return [html.Paragraph(" ".join(said), muted=True)]


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
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
