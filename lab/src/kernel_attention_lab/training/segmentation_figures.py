"""The figures of label maps: counts of (true, predicted) pixels, and what is read from them.

Legend: K classes.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.series.outputs import batch_outputs
from kernel_attention_lab.data.images.batches import ImageBatch
from kernel_attention_lab.data.segmentation.batches import make_whole_loader
from kernel_attention_lab.data.segmentation.sets import VOID, SegmentationSplit, even_places
from kernel_attention_lab.robustness.corruptions import CORRUPTIONS, SMALLEST, corrupt_image
from kernel_attention_lab.training.segmentation_recipe import SegmentationRecipe

_GRID = (128, 128)  # of the majority baseline, where label maps differ in size
_FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")


def count_pixels(predicted: Tensor, target: Tensor, classes: int) -> Tensor:
    """Pixels by true and predicted class, (K, K) int64; those without a class are left out.

    Args:
        predicted: class numbers of any shape.
        target: of the same shape, ``VOID`` where there is no class.
        classes: K.
    """
    known = target != VOID
    pairs = target[known].long() * classes + predicted[known].long()
    return torch.bincount(pairs, minlength=classes * classes).view(classes, classes).cpu()


def overlap_figures(counts: Tensor) -> dict[str, Any]:
    """Pixel accuracy, mean accuracy and mean intersection over union, all and by class.

    A class that no pixel has is None among the accuracies and left out of their mean. Among the intersections
    over union, this is so for a class that no pixel has and no pixel was predicted to have.

    Args:
        counts: pixels by true and predicted class, (K, K).
    """
    hits, true, predicted = counts.diag().double(), counts.sum(dim=1).double(), counts.sum(dim=0).double()
    accuracy, overlap = hits / true, hits / (true + predicted - hits)  # NaN for 0 / 0
    return {
        "mean_iou": overlap.nanmean().item(),
        "mean_accuracy": accuracy.nanmean().item(),
        "pixel_accuracy": (hits.sum() / true.sum()).item(),
        "class_iou": _or_none(overlap),
        "class_accuracy": _or_none(accuracy),
    }


def _or_none(values: Tensor) -> list[float | None]:
    return [None if value != value else value for value in values.tolist()]


def pixel_loss(logits: Tensor, target: Tensor) -> tuple[Tensor, int]:
    """Mean cross-entropy over the pixels that have a class, and their number; 0 where there is none.

    Args:
        logits: (B, K, H, W).
        target: (B, H, W) uint8.
    """
    count = int((target != VOID).sum())
    total = F.cross_entropy(logits, target.long(), ignore_index=VOID, reduction="sum")
    return total / max(count, 1), count


def enlarged(logits: Tensor, target: Tensor) -> Tensor:
    """Logits (B, K, h, w) enlarged to the size of the label maps (B, H, W)."""
    if logits.shape[-2:] == target.shape[-2:]:
        return logits
    return F.interpolate(logits, size=target.shape[-2:], mode="bilinear", align_corners=False)


def segmentation_figures(
    model: nn.Module, batches: Iterable[ImageBatch], classes: int, precision: str
) -> dict[str, Any]:
    """``overlap_figures`` of a model, its loss, and the counts of pixels as ``confusion_matrix``."""
    counts, total, cases = torch.zeros(classes, classes, dtype=torch.int64), 0.0, 0
    for outputs, batch in batch_outputs(model, batches, precision):
        logits = enlarged(outputs, batch.target)
        loss, count = pixel_loss(logits, batch.target)
        total += loss.item() * count
        counts += count_pixels(logits.argmax(dim=1), batch.target, classes)
        cases += len(batch.x)
    pixels = int(counts.sum())
    return overlap_figures(counts) | {
        "loss": total / max(pixels, 1),
        "confusion_matrix": counts.tolist(),
        "cases": cases,
        "pixels": pixels,
    }


def baseline_figures(
    train: SegmentationSplit, test: SegmentationSplit, classes: int
) -> dict[str, float | int]:
    """The figures of two predictions that look at no image.

    ``constant_``: the most frequent class of the training pixels everywhere. ``majority_``: at every place
    the most frequent class there. Where label maps differ in size, the places are those of a grid of
    128 x 128 cells that is stretched over every image.
    """
    sizes = {labels.shape for labels in train.labels}
    grid = sizes.pop() if len(sizes) == 1 else _GRID
    counts = np.zeros((classes + 1, *grid), dtype=np.int64)
    rows, columns = np.indices(grid)
    for labels in train.labels:
        label = _stretched(labels, grid)
        counts[np.where(label == VOID, classes, label), rows, columns] += 1
    counts = counts[:classes]
    constant = int(counts.sum(axis=(1, 2)).argmax())
    majority = np.where(counts.any(axis=0), counts.argmax(axis=0), constant).astype(np.uint8)
    found = {"constant": np.full(grid, constant, dtype=np.uint8), "majority": majority}
    figures: dict[str, float | int] = {}
    for name, predicted in found.items():
        pixels = torch.zeros(classes, classes, dtype=torch.int64)
        for labels in test.labels:
            there = torch.from_numpy(_stretched(predicted, labels.shape))
            pixels += count_pixels(there, torch.from_numpy(np.array(labels)), classes)
        for key in ("mean_iou", "mean_accuracy", "pixel_accuracy"):
            figures[f"{name}_{key}"] = overlap_figures(pixels)[key]
    return figures


def _stretched(labels: np.ndarray, size: tuple[int, ...]) -> np.ndarray:
    """The nearest label of every cell of a map of this size."""
    places = (
        ((np.arange(wanted) + 0.5) * found / wanted).astype(np.int64)
        for found, wanted in zip(labels.shape, size, strict=True)
    )
    return np.ascontiguousarray(labels[np.ix_(*places)])


class _Corrupted(Sequence[np.ndarray]):
    """Some images of a split, corrupted when they are asked for; the draws depend on their number in it."""

    def __init__(
        self, images: Sequence[np.ndarray], places: np.ndarray, corruption: str, severity: int
    ) -> None:
        self.images, self.places = images, places
        self.corruption, self.severity = corruption, severity

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, case: Any) -> Any:
        number = int(self.places[case])
        return corrupt_image(np.array(self.images[number]), self.corruption, self.severity, index=number)


def check_corruptible(split: SegmentationSplit) -> None:
    """InputError where the images are too small to be corrupted or a library is missing."""
    smallest = min(min(image.shape[:2]) for image in split.images)
    if smallest < SMALLEST:
        raise InputError(
            f"severities: corruptions need images of at least {SMALLEST} pixels a side, the smallest has "
            f"{smallest}; raise image_size"
        )
    corrupt_image(np.array(split.images[0]), CORRUPTIONS[0], 1)


def corrupted_figures(
    model: nn.Module, split: SegmentationSplit, recipe: SegmentationRecipe, classes: int
) -> dict[str, Any]:
    """The figures under every corruption of ImageNet-C at the recipe's severities, and their means.

    The means over all corruptions and severities are ``corrupted_mean_iou`` and so on, as in table 6 of the
    kernel-PCA paper. ``corruptions`` has one record a corruption and severity.

    Args:
        model: of the recipe.
        split: the cases, of which the recipe's ``corrupted_cases`` are taken. The labels stay as they are.
        recipe: severities, number of cases, batch size, precision.
        classes: K.
    """
    records: list[dict[str, Any]] = []
    places = even_places(len(split), recipe.corrupted_cases)
    labels = [split.labels[place] for place in places]
    for corruption in CORRUPTIONS:
        for severity in recipe.severities:
            images = _Corrupted(split.images, places, corruption, severity)
            corrupted = SegmentationSplit(images, labels)
            batches = make_whole_loader(corrupted, recipe.batch_size)
            figures = segmentation_figures(model, batches, classes, recipe.precision)
            records.append(
                {"corruption": corruption, "severity": severity} | {name: figures[name] for name in _FIGURES}
            )
    means = {f"corrupted_{name}": statistics.fmean(r[name] for r in records) for name in _FIGURES}
    return means | {"corrupted_cases": len(places), "corruptions": records}
