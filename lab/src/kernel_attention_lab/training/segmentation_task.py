"""The training of segmentations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kernel_attention.models.segmenter import Segmenter
from kernel_attention.training.task import TrainingTask
from kernel_attention_lab.data.images.batches import ImageBatch
from kernel_attention_lab.data.segmentation.sets import VOID
from kernel_attention_lab.training.image_task import decay_groups
from kernel_attention_lab.training.segmentation_figures import (
    count_pixels,
    enlarged,
    overlap_figures,
    pixel_loss,
)
from kernel_attention_lab.training.segmentation_recipe import SegmentationRecipe

_FIGURES = ("mean_iou", "mean_accuracy", "pixel_accuracy")


class SegmentationTask(TrainingTask):
    """Cross-entropy of the pixels that have a class.

    Logs per epoch: ``train_loss`` and ``train_pixel_accuracy`` of the crops, ``objective_layer_i`` (J), and
    of all validation pixels together ``val_loss``, ``val_mean_iou``, ``val_mean_accuracy`` and
    ``val_pixel_accuracy``.

    Args:
        model: images (B, C, H, W) in [0, 1] -> logits (B, K, H, W).
        recipe: optimizer and schedule.
    """

    model: Segmenter

    def __init__(self, model: Segmenter, recipe: SegmentationRecipe) -> None:
        super().__init__(model, recipe.train_settings())
        self.recipe: SegmentationRecipe = recipe
        self.classes = model.encoder.head.out_features
        self._counts = torch.zeros(self.classes, self.classes, dtype=torch.int64)

    def training_step(self, batch: ImageBatch) -> Tensor:
        """The cross-entropy of the pixels that have a class."""
        logits = self.model(*batch.arguments).float()
        loss, pixels = pixel_loss(logits, batch.target)
        hits = count_pixels(logits.detach().argmax(dim=1), batch.target, self.classes).diag().sum()
        figures = {"train_loss": loss.detach(), "train_pixel_accuracy": hits / max(pixels, 1)}
        self.log_dict(figures, max(pixels, 1))
        return loss

    def weight(self, batch: ImageBatch) -> int:
        """The pixels that have a class."""
        return int((batch.target != VOID).sum())

    def on_validation_epoch_start(self) -> None:
        self._counts.zero_()

    def validation_step(self, batch: ImageBatch) -> None:
        """Log the loss and count the pixels."""
        logits = enlarged(self.model(*batch.arguments).float(), batch.target)
        loss, pixels = pixel_loss(logits, batch.target)
        self.log("val_loss", loss, max(pixels, 1))
        if self.figures.counts:
            self._counts += count_pixels(logits.argmax(dim=1), batch.target, self.classes)

    def on_validation_epoch_end(self) -> None:
        """Log the figures of all pixels: the mean over batches of a ratio is not the ratio of the whole."""
        counts = self.trainer.processes.total(self._counts.flatten().tolist())
        figures = overlap_figures(torch.tensor(counts).view_as(self._counts))
        self.log_dict({f"val_{name}": figures[name] for name in _FIGURES})

    def parameter_groups(self) -> list[dict[str, Any]]:
        """No weight decay for some parameters, as in DeiT."""
        return decay_groups(self.model)

    def learning_rate_factor(self) -> Callable[[int], float]:
        """The recipe's schedule for this number of batches."""
        steps = self.trainer.total_steps
        return lambda step: self.recipe.learning_rate_factor(step, steps)
