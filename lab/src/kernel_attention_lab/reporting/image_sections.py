"""The section of an image run: example images with predictions, and the first layer's attention over them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import INK, PALETTE, data_uri, report_style
from kernel_attention_lab.reporting.formats import format_metric, sentence
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord

COLUMNS = 6  # of a grid of examples
ROW_LIMIT, HEAD_LIMIT = 6, 8  # of a picture of attention


def examples_section(run: RunRecord) -> html.Section | None:
    """Images of ``seed-K/examples.npz``, the seeds after the first folded; None for runs of other tasks."""
    records = [record for record in run.seeds if record.examples is not None]
    if run.task != "classification" or not records:
        return None
    first, *others = records
    pieces = _pieces(run, first)
    pieces += [html.Folded(f"Seed {record.seed}", _pieces(run, record)) for record in others]
    return html.Section("examples", "Examples", pieces)


def _pieces(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    examples = record.examples or {}
    images, targets, predictions = (examples[key] for key in ("images", "targets", "predictions"))
    is_right = targets == predictions
    grid = html.Picture(
        data_uri(example_grid(images, _titles(run, examples), is_right.tolist())),
        f"{len(images)} test images with predictions, {int(is_right.sum())} of them right.",
        "Evenly spaced test images: the predicted class with its probability, and, in orange, the true one "
        f"where that is another. Seed {record.seed}.",
        wide=True,
    )
    text = str(examples["attention_text"])
    maps = examples.get("attention")
    if maps is None:
        return [html.Pictures([grid]), html.Paragraph(sentence(text), muted=True)]
    rest = f" The first {HEAD_LIMIT} of {maps.shape[1]} heads." if maps.shape[1] > HEAD_LIMIT else ""
    attention = html.Picture(
        data_uri(attention_over_images(images, maps)),
        f"First layer's attention over {min(len(images), ROW_LIMIT)} images, by head.",
        f"First layer, {text}. Weights, or the kernel of a mechanism that has none. Bright is much; each map "
        f"has its own scale.{rest}",
        wide=maps.shape[1] > 3,
    )
    return [html.Pictures([grid]), html.Pictures([attention])]


def _titles(run: RunRecord, examples: Mapping[str, np.ndarray]) -> list[str]:
    names = run.class_names

    def name(number: int) -> str:
        text = names[number] if 0 <= number < len(names) else str(number)
        return text if len(text) <= 18 else f"{text[:17]}…"

    titles = []
    for target, predicted, probability in zip(
        *(examples[key] for key in ("targets", "predictions", "probabilities")), strict=True
    ):
        share = format_metric("accuracy", float(round(float(probability), 2))).replace(".00", "")
        said = f"{name(int(predicted))}, {share}"
        titles.append(said if target == predicted else f"{said}\n(is {name(int(target))})")
    return titles


@report_style()
def example_grid(images: np.ndarray, titles: Sequence[str], is_right: Sequence[bool]) -> Figure:
    """Images in rows of ``COLUMNS`` with a title each, orange where the prediction is wrong.

    Args:
        images: (n, H, W, 3) uint8.
        titles: n texts.
        is_right: whether each prediction is right.
    """
    columns = min(len(images), COLUMNS)
    rows = -(-len(images) // columns)
    lines = max(title.count("\n") + 1 for title in titles)
    figure = Figure(figsize=(1.75 * columns, rows * (1.65 + 0.16 * lines)))
    axes = figure.subplots(rows, columns, squeeze=False).ravel()
    for axis, image, title, right in zip(axes, images, titles, is_right, strict=False):
        _show(axis, image)
        color = INK if right else PALETTE[1]
        weight = "normal" if right else "bold"
        axis.set_title(title, fontsize=8.5, fontweight=weight, color=color, loc="center", parse_math=False)
    for unused in axes[len(images) :]:
        unused.remove()
    return figure


@report_style()
def attention_over_images(images: np.ndarray, maps: np.ndarray) -> Figure:
    """A row for each image: the image, and over it the attention of every head, each map on its own scale.

    Args:
        images: (n, H, W, 3) uint8; the first ``ROW_LIMIT`` evenly spaced ones are shown.
        maps: (n, h, rows, columns), a number for every patch; the first ``HEAD_LIMIT`` heads are shown.
    """
    places = np.linspace(0, len(images) - 1, min(len(images), ROW_LIMIT)).round().astype(int)
    heads = min(maps.shape[1], HEAD_LIMIT)
    figure = Figure(figsize=(1.45 * (heads + 1), 1.4 * len(places) + 0.3))
    axes = figure.subplots(len(places), heads + 1, squeeze=False)
    for row, place in zip(axes, places, strict=True):
        _show(row[0], images[place])
        gray = images[place].mean(-1)
        for head, axis in enumerate(row[1:]):
            _show(axis, gray, cmap="gray", vmin=0, vmax=255)
            extent = (-0.5, gray.shape[1] - 0.5, gray.shape[0] - 0.5, -0.5)
            colors = matplotlib.colormaps["inferno"]
            axis.imshow(maps[place, head], cmap=colors, extent=extent, interpolation="nearest", alpha=0.65)
    for head, axis in enumerate(axes[0][1:]):
        axis.set_title(f"head {head}", fontsize=8.5, fontweight="normal", loc="center")
    return figure


def _show(axis: Axes, image: np.ndarray, **options: object) -> None:
    axis.imshow(image, interpolation="nearest", **options)  # type: ignore[arg-type]
    axis.grid(False)
    axis.set(xticks=[], yticks=[])
