"""Splits, the scale of the pixels and the optimizer's groups, for all tasks on images."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention_lab.tasks.experiment import Experiment
from kernel_attention_lab.tasks.recipe import VisionRecipe

_AT_ONCE = 4096  # images whose statistics are taken at a time


class VisionExperiment(Experiment):
    """Learning from images, described by a ``VisionRecipe``.

    A subclass sets ``data``, with the splits ``train``, ``validation`` (or None) and ``test``, and ``test``,
    the test cases that are evaluated.
    """

    recipe: VisionRecipe
    has_classes: ClassVar[bool] = True
    data: Any
    test: Any

    @staticmethod
    @abstractmethod
    def hold_out(split: Any, fraction: float, seed: int) -> tuple[Any, Any]:
        """(the rest, about ``fraction`` of the cases), a function of ``seed``."""

    def split(self, seed: int) -> tuple[Any, Any]:
        """(training cases, cases that select the weights) under the recipe's protocol."""
        recipe, data = self.recipe, self.data
        if recipe.protocol == "paper":
            return data.train.evenly(recipe.train_cases), self.test
        if data.validation is not None:
            train, held_out = data.train, data.validation
        else:
            train, held_out = self.hold_out(data.train, recipe.validation_fraction, seed)
        return train.evenly(recipe.train_cases), held_out.evenly(recipe.evaluation_cases)


def channel_statistics(images: np.ndarray) -> tuple[Tensor, Tensor]:
    """Mean and deviation of every channel of images (n, H, W, C), of values in [0, 1]: (C,) each."""
    sums = np.zeros((2, images.shape[-1]))
    for start in range(0, len(images), _AT_ONCE):
        pixels = images[start : start + _AT_ONCE].reshape(-1, images.shape[-1]) / np.float32(255)
        sums += [pixels.sum(axis=0, dtype=np.float64), (pixels * pixels).sum(axis=0, dtype=np.float64)]
    mean, square = sums / (images.size / images.shape[-1])
    deviation = np.sqrt(np.maximum(square - mean**2, 0))
    # A constant channel keeps its values.
    return torch.from_numpy(mean), torch.from_numpy(np.where(deviation > 0, deviation, 1.0))


def decay_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Groups for the optimizer. Biases, norms, positions and the class token have no weight decay (DeiT)."""
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for name, parameter in model.named_parameters():
        is_kept = parameter.dim() <= 1 or name.rpartition(".")[2] in ("positions", "class_token")
        (kept if is_kept else decayed).append(parameter)
    return [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
