"""The classes that a model confuses: the matrix, and the figures of every class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import INK, RULE, data_uri, report_style
from kernel_attention_lab.reporting.formats import MISSING, format_metric, format_seeds
from kernel_attention_lab.reporting.records import RunRecord
from kernel_attention_lab.run_folder import is_number

COUNT_LIMIT = 20  # a confusion matrix shows its counts up to this number of classes
NAME_LIMIT = 60  # and the names up to this one


def classes_section(run: RunRecord) -> html.Section | None:
    """The confusion matrix on the test split, summed over seeds, and the figures of every class.

    None for tasks without classes.
    """
    title = "Confusion matrix"
    if run.task not in ("classification", "segmentation"):
        return None
    counts = run.confusion_counts
    if counts is None:
        reason = "the test split has not been evaluated"
        if run.evaluated:
            reason = "those of the seeds do not fit together"
        return html.Section("confusion", title, [html.Paragraph(f"No confusion matrix: {reason}.")])
    classes, of_pixels = len(counts), run.task == "segmentation"
    names = run.names_of(classes)
    worst = _worst(counts, names, of_pixels)
    if of_pixels:
        said, caption = (
            "",
            f"Test pixels by true (row) and predicted (column) class, in % of the row. {worst}",
        )
    else:
        said = f" {int(np.trace(counts))} of {int(counts.sum())} test cases on the diagonal."
        seeds = [record.seed for record in run.evaluated]
        added = f", summed over {format_seeds(seeds)}" if len(seeds) > 1 else ""
        written = "; empty cells are 0" if classes <= COUNT_LIMIT else ""
        caption = (
            f"Test cases by true (row) and predicted (column) class{added}. "
            f"Colours are shares of the row{written}. {worst}"
        )
    alt = f"Confusion matrix of {classes} classes.{said} {worst}"
    figure = confusion_matrix(counts, names, percent=of_pixels)
    table = _pixel_table(run, counts, names) if of_pixels else _case_table(counts, names)
    pictures = html.Pictures([html.Picture(data_uri(figure), alt, caption)])
    return html.Section("confusion", title, [pictures, *table])


def _worst(counts: np.ndarray, names: Sequence[str], of_pixels: bool) -> str:
    wrong = counts - np.diag(np.diag(counts))
    if not wrong.any():
        return f"No {'pixel' if of_pixels else 'test case'} was confused."
    row, column = (int(place) for place in np.unravel_index(int(wrong.argmax()), wrong.shape))
    times = int(wrong[row, column])
    if of_pixels:
        share = format_metric("accuracy", times / float(wrong.sum()))
        return f"The most frequent error, {share} of all: {names[row]} predicted as {names[column]}."
    if times == 1:
        return "No two classes were confused more than once."
    return f"The most frequent error: class {names[row]} predicted as {names[column]}, {times} times."


def _share(part: float, whole: float) -> str:
    return format_metric("accuracy", float(part / whole)) if whole else MISSING


def _case_table(counts: np.ndarray, names: Sequence[str]) -> list[html.Piece]:
    hits, true, predicted = np.diag(counts), counts.sum(axis=1), counts.sum(axis=0)
    rows = [
        [name, str(all_true), str(all_predicted), _share(right, all_true), _share(right, all_predicted)]
        for name, right, all_true, all_predicted in zip(names, hits, true, predicted, strict=True)
    ]
    head = ["class", "true cases", "predicted", "recall", "precision"]
    return [html.Folded("Recall and precision by class", [html.Table(head, rows, numbers=True)])]


def _pixel_table(run: RunRecord, counts: np.ndarray, names: Sequence[str]) -> list[html.Piece]:
    columns = {key: _mean_list(run, key) for key in ("class_iou", "class_accuracy")}
    if any(len(values) != len(names) for values in columns.values()):
        return []
    totals = counts.sum(axis=1)
    rows = [
        [
            name,
            _share(totals[at], max(totals.sum(), 1)),
            *(format_metric(key, values[at]) for key, values in columns.items()),
        ]
        for at, name in enumerate(names)
    ]
    head = ["class", "share of the pixels", "IoU", "accuracy"]
    caption = "Test figures by class: intersection over union, and the share of its pixels that are found."
    return [html.Table(head, rows, caption, numbers=True)]


def _mean_list(run: RunRecord, key: str) -> list[float | None]:
    """The mean over the seeds of every entry of a list of figures; empty where no seed has the list."""
    found = [
        values for record in run.evaluated if isinstance(values := (record.evaluation or {}).get(key), list)
    ]
    if any(len(values) != len(found[0]) for values in found):
        return []
    numbers = [
        [float(value) for value in entries if is_number(value)] for entries in zip(*found, strict=True)
    ]
    return [float(np.mean(values)) if values else None for values in numbers]


@report_style()
def confusion_matrix(counts: np.ndarray, class_names: Sequence[str], percent: bool = False) -> Figure:
    """Counts of (true, predicted) pairs, coloured by the share of the true class.

    Args:
        counts: (classes, classes), rows are the true classes.
        class_names: one name per class; shown up to ``NAME_LIMIT`` classes, counts up to ``COUNT_LIMIT``.
        percent: write the shares of the true class instead of the counts, in whole %.
    """
    classes, few = len(counts), len(counts) <= COUNT_LIMIT
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros(counts.shape), where=totals > 0)
    names = [name if len(name) <= 22 else f"{name[:21]}…" for name in class_names]
    names = names if classes <= NAME_LIMIT else []
    longest = max(map(len, names), default=3)
    is_crowded = bool(names) and classes * longest > 40 and longest > 2  # side by side they would touch
    # Inches: cells that hold a count, the names, the titles of the axes and the bar.
    cells, inches = min(max(2.8, (0.45 if few else 0.24) * classes), 7.2), (0.082 if few else 0.06) * longest
    figure = Figure(figsize=(cells + inches + 1.55, cells + (inches if is_crowded else 0.15) + 0.6))
    axis = figure.subplots()
    blues = LinearSegmentedColormap.from_list("share", ["#ffffff", "#9ecae9", "#0072B2", "#06304f"])
    image = axis.imshow(shares, cmap=blues, vmin=0, vmax=1, interpolation="nearest")
    axis.grid(False)
    axis.spines[["top", "right"]].set_visible(True)
    axis.set(xlabel="predicted class", ylabel="true class")
    if names:
        # parse_math: a class may have the name "$x$", which is not a formula.
        text: dict[str, Any] = {"fontsize": 9 if few else 6.5, "parse_math": False}
        axis.set_yticks(range(classes), names, **text)
        axis.set_xticks(range(classes), names, rotation=90 if is_crowded else 0, **text)
    if few:
        _write_counts(axis, (100 * shares).round().astype(int) if percent else counts, shares)
    bar = figure.colorbar(image, ax=axis, shrink=0.9, pad=0.02, aspect=28)
    bar.ax.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    bar.ax.set_ylabel("share of the true class")
    return figure


def _write_counts(axis: Axes, counts: np.ndarray, shares: np.ndarray) -> None:
    edges = np.arange(len(counts) - 1) + 0.5
    axis.set_xticks(edges, minor=True)
    axis.set_yticks(edges, minor=True)
    axis.grid(True, which="minor", color=RULE, linewidth=0.7)
    axis.tick_params(which="minor", length=0)
    for (row, column), count in np.ndenumerate(counts):
        if count:
            color = "white" if shares[row, column] > 0.5 else INK
            axis.text(column, row, f"{int(count)}", ha="center", va="center", color=color, fontsize=8)
