"""The figures of a segmentation on corrupted images."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.segmentation.batches import make_whole_loader
from kernel_attention.experiments.data.segmentation.sets import SegmentationSplit, even_places
from kernel_attention.experiments.robustness.corruptions import CORRUPTIONS, SMALLEST, corrupt_image
from kernel_attention.experiments.training.segmentation_figures import segmentation_figures
from kernel_attention.experiments.training.segmentation_recipe import SegmentationRecipe

_FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")


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
