"""The logits of a classifier of images, from the bytes of the images."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError


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
    if images.ndim != 4 or images.dtype != np.uint8 or len(images) == 0:
        raise InputError(f"images must be (n, H, W, C) uint8, n >= 1, not {images.dtype} {images.shape}")
    like = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            parts = []
            for start in range(0, len(images), batch_size):
                pixels = torch.from_numpy(np.array(images[start : start + batch_size]))
                batch = pixels.permute(0, 3, 1, 2).to(device=like.device, dtype=like.dtype) / 255
                parts.append(model(batch).cpu())
    finally:
        model.train(was_training)
    logits = torch.cat(parts)
    return logits if classes is None else logits[:, _checked(classes, logits.shape[1])]


def _checked(classes: Sequence[int], outputs: int) -> Tensor:
    kept = torch.as_tensor(classes)
    is_right = kept.ndim == 1 and len(kept) and not kept.is_floating_point()
    if not is_right or kept.min() < 0 or kept.max() >= outputs or len(kept.unique()) < len(kept):
        raise InputError(f"classes must be different numbers from 0 to {outputs - 1}, not {list(classes)}")
    return kept
