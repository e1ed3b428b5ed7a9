"""The sections of a segmentation: examples in colour, figures by class, baselines, confusion, corruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention.experiments.reporting import html, plots
from kernel_attention.experiments.reporting.figures import data_uri
from kernel_attention.experiments.reporting.formats import MISSING, format_metric, metric_name
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord
from kernel_attention.experiments.reporting.segmentation_plots import (
    LEGEND_LIMIT,
    VOID,
    overlay_grid,
)
from kernel_attention.experiments.run_folder import is_number

FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")
PREDICTORS = {
    "": "the model",
    "corrupted_": "the model, corrupted images",
    "majority_": "at every place the most frequent class there",
    "constant_": "the most frequent class everywhere",
}


def segmentation_sections(run: RunRecord) -> list[html.Section | None]:
    """The sections of a run of task segmentation; empty for other tasks."""
    if run.task != "segmentation":
        return []
    return [
        _overlays(run),
        _predictors(run),
        _classes(run),
        _confusion(run),
        _corruptions(run),
    ]


def _overlays(run: RunRecord) -> html.Section | None:
    records = [record for record in run.seeds if record.examples is not None]
    if not records:
        return None
    first, *others = [html.Pictures([_picture(run, record)]) for record in records]
    folded = [
        html.Folded(f"Seed {record.seed}", [piece]) for record, piece in zip(records[1:], others, strict=True)
    ]
    return html.Section("examples", "Examples", [first, *folded])


def _picture(run: RunRecord, record: SeedRecord) -> html.Picture:
    examples = record.examples or {}
    images, labels, predictions = (examples[key] for key in ("images", "labels", "predictions"))
    largest = max(int(maps.max(where=maps != VOID, initial=0)) for maps in (labels, predictions))
    names = _names(run, largest + 1)
    known = labels != VOID
    right = float((labels == predictions)[known].mean()) if known.any() else 0.0
    most = f" The {LEGEND_LIMIT} most frequent classes are named." if len(names) > LEGEND_LIMIT else ""
    return html.Picture(
        data_uri(overlay_grid(images, labels, predictions, names)),
        f"{len(images)} test images with labels and predictions in colour; the model is right on "
        f"{format_metric('accuracy', right)} of their pixels.",
        "Evenly spaced test images: as they are, with their labels, and with the predictions. Pixels without "
        f"a class keep the colours of the image.{most} Seed {record.seed}.",
        wide=True,
    )


def _predictors(run: RunRecord) -> html.Section | None:
    if run.mean("mean_iou") is None:
        return None
    rows = []
    for prefix, name in PREDICTORS.items():
        values = [run.mean(f"{prefix}{key}") for key in FIGURES]
        if any(value is not None for value in values):
            rows.append(
                [name, *(format_metric(key, value) for key, value in zip(FIGURES, values, strict=True))]
            )
    caption = "The test split by what predicts it. The two last look at no image."
    if len(run.evaluated) > 1:
        caption += " Means over the seeds."
    head = ["what predicts", *map(metric_name, FIGURES)]
    return html.Section("predictors", "Baselines", [html.Table(head, rows, caption, numbers=True)])


def _classes(run: RunRecord) -> html.Section | None:
    columns = {key: _mean_list(run, key) for key in ("class_iou", "class_accuracy")}
    counts = run.confusion_counts
    if counts is None or any(values is None for values in columns.values()):
        return None
    names = _names(run, len(counts))
    totals = counts.sum(axis=1)
    rows = [
        [
            name,
            format_metric("share_accuracy", float(totals[index] / max(totals.sum(), 1))),
            *(format_metric(key, (values or [])[index]) for key, values in columns.items()),
        ]
        for index, name in enumerate(names)
    ]
    head = ["class", "share of the pixels", "IoU", "accuracy"]
    caption = "Test figures by class: intersection over union, and the share of its pixels that are found."
    return html.Section("classes", "Classes", [html.Table(head, rows, caption, numbers=True)])


def _confusion(run: RunRecord) -> html.Section | None:
    counts = run.confusion_counts
    if counts is None:
        return None
    names = _names(run, len(counts))
    figure = plots.confusion_matrix(counts, names, percent=True)
    said = f"Confusion matrix of {len(counts)} classes; {_worst(counts, names)}"
    caption = (
        f"Test pixels by true (row) and predicted (column) class, in % of the row. {_worst(counts, names)}"
    )
    return html.Section(
        "confusion", "Confusion matrix", [html.Pictures([html.Picture(data_uri(figure), said, caption)])]
    )


def _worst(counts: np.ndarray, names: Sequence[str]) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if not wrong.any():
        return "No pixel was confused."
    row, column = (int(place) for place in np.unravel_index(int(wrong.argmax()), wrong.shape))
    share = format_metric("accuracy", float(wrong[row, column] / wrong.sum()))
    return f"The most frequent error, {share} of all: {names[row]} predicted as {names[column]}."


def _corruptions(run: RunRecord) -> html.Section | None:
    records = [
        entry
        for record in run.evaluated
        for entry in (record.evaluation or {}).get("corruptions") or []
        if isinstance(entry, Mapping) and is_number(entry.get("mean_iou"))
    ]
    if not records:
        return None
    found = {entry.get("severity") for entry in records}
    severities = sorted(severity for severity in found if is_number(severity))
    kinds = list(dict.fromkeys(str(entry.get("corruption")) for entry in records))

    def mean(kind: str, severity: Any) -> str:
        found = [
            e["mean_iou"] for e in records if (e.get("corruption"), e.get("severity")) == (kind, severity)
        ]
        return format_metric("mean_iou", float(np.mean(found))) if found else MISSING

    rows = [[kind.replace("_", " "), *(mean(kind, severity) for severity in severities)] for kind in kinds]
    cases = run.mean("corrupted_cases")
    of = "" if cases is None else f" of {int(cases)} test images"
    caption = f"Mean IoU{of} under the corruptions of ImageNet-C, by severity."
    head = ["corruption", *(f"severity {severity}" for severity in severities)]
    return html.Section("corruptions", "Corruptions", [html.Table(head, rows, caption, numbers=True)])


def _names(run: RunRecord, count: int) -> list[str]:
    names = run.class_names
    return names if len(names) >= count else [str(index) for index in range(count)]


def _mean_list(run: RunRecord, key: str) -> list[float | None] | None:
    """The mean over the seeds of every entry of a list of figures; None where no seed has the list."""
    lists = [(record.evaluation or {}).get(key) for record in run.evaluated]
    found = [values for values in lists if isinstance(values, list)]
    if not found or any(len(values) != len(found[0]) for values in found):
        return None
    means = []
    for entries in zip(*found, strict=True):
        numbers = [float(value) for value in entries if is_number(value)]
        means.append(float(np.mean(numbers)) if numbers else None)
    return means
