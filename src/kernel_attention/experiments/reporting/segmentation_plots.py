"""Pictures of a segmentation: images with their labels and predictions in colour."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from kernel_attention.experiments.reporting.figures import report_style

VOID = 255  # the label of a pixel without a class
LEGEND_LIMIT = 30  # classes with a colour in the legend

_OPACITY = 0.6
_GOLDEN = 0.618034  # of a turn of the hue, from a class to the next: neighbours differ whatever their number
# Saturation and value, in turn. Nearly equal hues are a Fibonacci number of classes apart, of which the first
# that 7 divides is 21.
_TONES = ((0.85, 0.95), (0.55, 0.95), (0.85, 0.7), (0.45, 0.75), (0.95, 0.5), (0.6, 0.55), (0.3, 0.9))
_FEW = 20


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
