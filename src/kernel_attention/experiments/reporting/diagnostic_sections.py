"""The part of the report that ``analyze`` adds: what the attention of each layer does."""

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
from kernel_attention.experiments.reporting.formats import sentence
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord
from kernel_attention.experiments.reporting.spectrum_plots import HEAD_LIMIT
from kernel_attention.experiments.reporting.tables import diagnostics_rows


def diagnostics_section(run: RunRecord) -> html.Section | None:
    """Tables and figures of ``seed-K/diagnostics.json``; None for a run that was not analysed."""
    records = [record for record in run.seeds if record.diagnostics]
    if not records:
        return None
    first, *others = records
    body = html.pictures(_pictures(run, first)) + _table(first)
    for record in others:
        body += html.folded(f"Seed {record.seed}", html.pictures(_pictures(run, record)) + _table(record))
    body += html.paragraph(
        "J_proj and gamma are those of softmax attention with the layer's queries, keys and values; head "
        "distances are L2 distances between rows of the heads' attention matrices, averaged over the rows. "
        "All numbers, per sequence and head, are in diagnostics.npz in the folder of each seed.",
        "muted",
    )
    return html.Section("diagnostics", "What the attention does", body)


def _layers(record: SeedRecord) -> Sequence[Mapping[str, Any]]:
    return (record.diagnostics or {}).get("layers", [])


def _table(record: SeedRecord) -> str:
    layers = _layers(record)
    head, rows = diagnostics_rows(layers)
    note = str((record.diagnostics or {}).get("note") or "")
    remarks = dict.fromkeys(f"{layer['name']}: {text}" for layer in layers for text in layer["notes"])
    caption = f"Means over sequences and heads, seed {record.seed}. {sentence(note)}"
    written = "".join(html.paragraph(sentence(text), "muted") for text in remarks)
    return html.table(head, rows, caption, numbers=True) + written


def _pictures(run: RunRecord, record: SeedRecord) -> list[html.Picture]:
    pictures = []
    figure = measures_figure(_layers(record))
    if figure is not None:
        shown = {key for layer in _layers(record) for key in layer["by_head"]}
        pictures.append(
            html.Picture(
                data_uri(figure),
                "Charts by layer: cumulative explained variance of the attention, and "
                f"{', '.join(LABELS[key] for key in LABELS if key in shown) or 'nothing else'}.",
                f"Seed {record.seed}. Mean cumulative explained variance of each layer's attention, with a "
                "dashed line at 90 %; in the other panels a dot is a head (of distances: a pair of heads), "
                "the bar their median.",
            )
        )
    maps = maps_figure(_maps(run, record))
    if maps is not None:
        pictures.append(
            html.Picture(
                data_uri(maps),
                "Attention maps of one sequence by layer and head.",
                "The first sequence: attention with queries down and keys across, or scores of the tokens "
                f"(down); each map on its own scale, up to {MAP_LIMIT} of them and {HEAD_LIMIT} heads.",
            )
        )
    return pictures


def _maps(run: RunRecord, record: SeedRecord) -> dict[str, np.ndarray]:
    """From ``diagnostics.npz``; empty where it is missing or damaged, which costs the picture only."""
    path = run.path / f"seed-{record.seed}" / "diagnostics.npz"
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return select_maps({name: arrays[name] for name in arrays.files})
    except (OSError, ValueError, EOFError, zipfile.BadZipFile):
        return {}
