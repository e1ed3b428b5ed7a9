"""The logits of a classifier from batches of its arguments, and images as such batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError

Inputs: TypeAlias = Iterable[tuple[Tensor, ...]]
"""Batches of a model's arguments on the CPU, which can be read again and again."""


@dataclass(frozen=True, eq=False)
class PixelBatches:
    """Batches (B, C, H, W) in [0, 1], made as they are read.

    Args:
        images: (n, H, W, C) uint8.
        batch_size: images at a time.

    Raises:
        InputError: for other images, and for no images.
    """

    images: np.ndarray
    batch_size: int = 256

    def __post_init__(self) -> None:
        images = self.images
        if images.ndim != 4 or images.dtype != np.uint8 or len(images) == 0:
            raise InputError(f"images must be (n, H, W, C) uint8, n >= 1, not {images.dtype} {images.shape}")

    def __iter__(self) -> Iterator[tuple[Tensor]]:
        for start in range(0, len(self.images), self.batch_size):
            pixels = torch.from_numpy(np.array(self.images[start : start + self.batch_size]))
            yield (pixels.permute(0, 3, 1, 2) / 255,)


def placed(batch: tuple[Tensor, ...], model: nn.Module) -> tuple[Tensor, ...]:
    """A batch where the model is, its numbers in the model's precision."""
    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    return tuple(
        each.to(like.device, like.dtype) if each.is_floating_point() else each.to(like.device)
        for each in batch
    )


def input_logits(model: nn.Module, inputs: Inputs) -> Tensor:
    """Logits (n, outputs) on the CPU, in evaluation mode, without gradients; the mode stays as it was."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return torch.cat([model(*placed(batch, model)).cpu() for batch in inputs])
    finally:
        model.train(was_training)


def pixel_logits(
    model: nn.Module, images: np.ndarray, *, classes: Sequence[int] | None = None, batch_size: int = 256
) -> Tensor:
    """Logits of images in evaluation mode, without gradients; the model's mode stays as it was.

    Args:
        model: (B, C, H, W) in [0, 1] -> (B, outputs) logits.
        images: (n, H, W, C) uint8.
        classes: the outputs that count, for a set that has fewer classes than the model; by default all.
        batch_size: images at a time.

    Returns:
        (n, outputs) or (n, len(classes)), on the CPU.

    Raises:
        InputError: for other images, for no images, and for classes that the model does not have.
    """
    logits = input_logits(model, PixelBatches(images, batch_size))
    return logits if classes is None else logits[:, _checked(classes, logits.shape[1])]


def _checked(classes: Sequence[int], outputs: int) -> Tensor:
    kept = torch.as_tensor(classes)
    is_right = kept.ndim == 1 and len(kept) and not kept.is_floating_point()
    if not is_right or kept.min() < 0 or kept.max() >= outputs or len(kept.unique()) < len(kept):
        raise InputError(f"classes must be different numbers from 0 to {outputs - 1}, not {list(classes)}")
    return kept
