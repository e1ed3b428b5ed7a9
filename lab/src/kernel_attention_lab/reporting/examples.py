"""The model at work: test images with predictions, attention or labels over them; the film of an episode."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import (
    INK,
    PALETTE,
    data_uri,
    image_grid,
    report_style,
    show_image,
)
from kernel_attention_lab.reporting.formats import format_metric, format_number, sentence
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.run_folder import is_number

COLUMNS = 6  # of a grid of examples
ROW_LIMIT, HEAD_LIMIT = 6, 8  # of a picture of attention
VOID = 255  # the label of a pixel without a class
LEGEND_LIMIT = 30  # classes with a colour in the legend
_OPACITY = 0.6
_GOLDEN = 0.618034  # of a turn of the hue, from a class to the next: neighbours differ whatever their number
# Saturation and value, in turn. Nearly equal hues are a Fibonacci number of classes apart, of which the first
# that 7 divides is 21.
_TONES = ((0.85, 0.95), (0.55, 0.95), (0.85, 0.7), (0.45, 0.75), (0.95, 0.5), (0.6, 0.55), (0.3, 0.9))
_FEW = 20


def examples_section(run: RunRecord) -> html.Section | None:
    """Images of ``seed-K/examples.npz``, the seeds after the first folded; None for runs of other tasks."""
    pieces_of = {"classification": _images, "segmentation": _label_maps}.get(run.task)
    records = [record for record in run.seeds if record.examples is not None]
    if pieces_of is None or not records:
        return None
    first, *others = records
    folded = [html.Folded(f"Seed {record.seed}", pieces_of(run, record)) for record in others]
    return html.Section("examples", "Examples", [*pieces_of(run, first), *folded])


def film_section(run: RunRecord) -> html.Section | None:
    """The film of each seed's episode, where ``play`` made one."""
    films = [html.Pictures([_film(record, record.film)]) for record in run.seeds if record.film is not None]
    return html.Section("agent", "An episode in pictures", films) if films else None


def _film(record: SeedRecord, film: bytes) -> html.Picture:
    said = record.episode or {}
    score = said.get("normalized_score")
    known = f", normalised score {format_number(score)}" if is_number(score) else ""
    text = (
        f"{said.get('environment', 'The environment')}, seed {record.seed} of the model, seed "
        f"{said.get('episode_seed')} of the episode: return {format_number(said.get('episode_return'))}"
        f"{known} after {format_number(said.get('length'))} steps, asked for "
        f"{format_number(said.get('target'))}."
    )
    uri = f"data:image/gif;base64,{base64.b64encode(film).decode('ascii')}"
    return html.Picture(uri, f"The film of an episode. {text}", text)


def _images(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    examples = record.examples or {}
    images = examples["images"]
    is_right = examples["targets"] == examples["predictions"]
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
    names = dict(enumerate(run.class_names))

    def name(number: int) -> str:
        text = names.get(number, str(number))
        return text if len(text) <= 18 else f"{text[:17]}…"

    titles = []
    columns = (examples[key].tolist() for key in ("targets", "predictions", "probabilities"))
    for target, predicted, probability in zip(*columns, strict=True):
        share = format_metric("accuracy", float(round(probability, 2))).replace(".00", "")
        said = f"{name(predicted)}, {share}"
        titles.append(said if target == predicted else f"{said}\n(is {name(target)})")
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
    figure, grid = image_grid(rows, columns, (1.75 * columns, rows * (1.65 + 0.16 * lines)))
    axes = grid.ravel()
    for axis, image, title, right in zip(axes, images, titles, is_right, strict=False):
        show_image(axis, image)
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
    heads, colors = min(maps.shape[1], HEAD_LIMIT), matplotlib.colormaps["inferno"]
    figure, axes = image_grid(len(places), heads + 1, (1.45 * (heads + 1), 1.4 * len(places) + 0.3))
    for row, place in zip(axes, places, strict=True):
        show_image(row[0], images[place])
        gray = images[place].mean(-1)
        extent = (-0.5, gray.shape[1] - 0.5, gray.shape[0] - 0.5, -0.5)
        for head, axis in enumerate(row[1:]):
            show_image(axis, gray, cmap="gray", vmin=0, vmax=255)
            show_image(axis, maps[place, head], cmap=colors, extent=extent, alpha=0.65)
    for head, axis in enumerate(axes[0][1:]):
        axis.set_title(f"head {head}", fontsize=8.5, fontweight="normal", loc="center")
    return figure


# --- label maps ---------------------------------------------------------------------------------------------


def _label_maps(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    examples = record.examples or {}
    images, labels, predictions = (examples[key] for key in ("images", "labels", "predictions"))
    count = 1 + max(int(maps.max(where=maps != VOID, initial=0)) for maps in (labels, predictions))
    names = run.names_of(max(count, len(run.class_names)))
    known = labels != VOID
    right = float((labels == predictions)[known].mean()) if known.any() else 0.0
    most = f" The {LEGEND_LIMIT} most frequent classes are named." if len(names) > LEGEND_LIMIT else ""
    picture = html.Picture(
        data_uri(overlay_grid(images, labels, predictions, names)),
        f"{len(images)} test images with labels and predictions in colour; the model is right on "
        f"{format_metric('accuracy', right)} of their pixels.",
        "Evenly spaced test images: as they are, with their labels, and with the predictions. Pixels without "
        f"a class keep the colours of the image.{most} Seed {record.seed}.",
        wide=True,
    )
    return [html.Pictures([picture])]


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
    figure, axes = image_grid(rows, 3, (10.4, rows * 3.3 * height / width + 0.9))
    for row, image, truth, predicted in zip(axes, images, labels, predictions, strict=True):
        shown = (image, colored(image, truth, colors), colored(image, predicted, colors))
        for axis, each in zip(row, shown, strict=True):
            show_image(axis, each)
            axis.spines[:].set_visible(False)
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
