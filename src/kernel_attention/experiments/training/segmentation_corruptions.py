"""The figures of a segmentation on corrupted images."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import nn

from kernel_attention.experiments.data.segmentation import SegmentationSplit
from kernel_attention.experiments.data.segmentation_batches import make_whole_loader
from kernel_attention.experiments.robustness.corruptions import CORRUPTIONS, corrupt_image
from kernel_attention.experiments.training.segmentation_figures import segmentation_figures
from kernel_attention.experiments.training.segmentation_recipe import SegmentationRecipe

_FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")


class _Corrupted(Sequence[np.ndarray]):
    """Images that are corrupted when they are asked for."""

    def __init__(self, images: Sequence[np.ndarray], corruption: str, severity: int) -> None:
        self.images, self.corruption, self.severity = images, corruption, severity

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, case: Any) -> Any:
        return corrupt_image(np.array(self.images[case]), self.corruption, self.severity, index=case)


def corrupted_figures(
    model: nn.Module, split: SegmentationSplit, recipe: SegmentationRecipe, classes: int
) -> dict[str, Any]:
    """The figures under every corruption of ImageNet-C at the recipe's severities, and their means.

    The means over all corruptions and severities are ``corrupted_mean_iou`` and so on, as in table 6 of the
    kernel-PCA paper. ``corruptions`` has one record a corruption and severity.

    Args:
        model: of the recipe.
        split: the cases; the labels stay as they are.
        recipe: severities, batch size, precision.
        classes: K.
    """
    records: list[dict[str, Any]] = []
    for corruption in CORRUPTIONS:
        for severity in recipe.severities:
            corrupted = SegmentationSplit(_Corrupted(split.images, corruption, severity), split.labels)
            batches = make_whole_loader(corrupted, recipe.batch_size)
            figures = segmentation_figures(model, batches, classes, recipe.precision)
            records.append(
                {"corruption": corruption, "severity": severity} | {name: figures[name] for name in _FIGURES}
            )
    means = {f"corrupted_{name}": statistics.fmean(r[name] for r in records) for name in _FIGURES}
    return means | {"corrupted_cases": len(split), "corruptions": records}
