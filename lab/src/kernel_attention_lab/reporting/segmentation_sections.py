"""The sections of a segmentation: examples in colour, figures by class, baselines, confusion, corruptions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernel_attention_lab.reporting import html, plots
from kernel_attention_lab.reporting.figures import data_uri, report_style
from kernel_attention_lab.reporting.formats import MISSING, format_metric, metric_name
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.run_folder import is_number

FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")
PREDICTORS = {
    "": "the model",
    "corrupted_": "the model, corrupted images",
    "majority_": "at every place the most frequent class there",
    "constant_": "the most frequent class everywhere",
}
VOID = 255  # the label of a pixel without a class
LEGEND_LIMIT = 30  # classes with a colour in the legend
_OPACITY = 0.6
_GOLDEN = 0.618034  # of a turn of the hue, from a class to the next: neighbours differ whatever their number
# Saturation and value, in turn. Nearly equal hues are a Fibonacci number of classes apart, of which the first
# that 7 divides is 21.
_TONES = ((0.85, 0.95), (0.55, 0.95), (0.85, 0.7), (0.45, 0.75), (0.95, 0.5), (0.6, 0.55), (0.3, 0.9))
_FEW = 20


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


def class_colors(count: int) -> np.ndarray:
    """A colour for each class, (count, 3) in [0, 1]: matplotlib's tab20, or other hues for more than 20."""
    if count <= _FEW:
        # The dark colours first, then their light twins.
        order = [*range(0, _FEW, 2), *range(1, _FEW, 2)]
        return np.array([matplotlib.colormaps["tab20"](place)[:3] for place in order[:count]])
    places = np.arange(count)
    tones = np.column_stack([places * _GOLDEN % 1, np.array(_TONES)[places % len(_TONES)]])
    return matplotlib.colors.hsv_to_rgb(tones)


def colored(image: np.ndarray, labels: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """An image in gray under the colours of its labels, (H, W, 3) in [0, 1].

    Pixels without a class keep their own colours.

    Args:
        image: (H, W, 3) uint8.
        labels: (H, W), ``VOID`` where there is no class.
        colors: (classes, 3) in [0, 1].
    """
    gray = image.mean(axis=2, keepdims=True) / 255
    known = (labels != VOID)[..., None]
    painted = colors[np.where(labels == VOID, 0, labels)]
    return np.where(known, (1 - _OPACITY) * gray + _OPACITY * painted, image / 255)


@report_style()
def overlay_grid(
    images: np.ndarray, labels: np.ndarray, predictions: np.ndarray, class_names: Sequence[str]
) -> Figure:
    """A row for each image: the image, its labels and the predictions over it; below, the colours of classes.

    Args:
        images: (n, H, W, 3) uint8.
        labels: (n, H, W), ``VOID`` where there is no class.
        predictions: (n, H, W).
        class_names: in the order of their numbers. The legend has the classes that are seen, up to
            ``LEGEND_LIMIT``, the most frequent first where there are more.
    """
    colors = class_colors(len(class_names))
    rows, (height, width) = len(images), images.shape[1:3]
    figure = Figure(figsize=(10.4, rows * 3.3 * height / width + 0.9))
    axes = figure.subplots(rows, 3, squeeze=False)
    for row, image, truth, predicted in zip(axes, images, labels, predictions, strict=True):
        _show(row[0], image)
        _show(row[1], colored(image, truth, colors))
        _show(row[2], colored(image, predicted, colors))
    for axis, title in zip(axes[0], ("image", "labels", "prediction"), strict=True):
        axis.set_title(title)
    counts = np.bincount(np.concatenate([labels.ravel(), predictions.ravel()]), minlength=VOID + 1)
    seen = sorted(np.argsort(-counts[: len(class_names)], kind="stable")[:LEGEND_LIMIT])
    handles = [
        Patch(color=tuple(_OPACITY * colors[number] + (1 - _OPACITY) * 0.5), label=class_names[number])
        for number in seen
        if counts[number]
    ]
    legend = figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6) or 1)
    for text in legend.get_texts():
        text.set_parse_math(False)
    return figure


def _show(axis: Axes, image: np.ndarray) -> None:
    axis.imshow(image, interpolation="nearest")
    axis.grid(False)
    axis.set(xticks=[], yticks=[])
    axis.spines[:].set_visible(False)
