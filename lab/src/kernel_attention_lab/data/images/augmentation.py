"""Augmentation of batches of images on the device that trains; its random numbers are torch's own.

Crops and mirror images are kornia's. Mixup and cutmix follow their papers, with one ratio a batch as in DeiT.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import unknown
from kernel_attention_lab.data.images.batches import middle
from kernel_attention_lab.data.images.rand_augment import rand_augment

if TYPE_CHECKING:
    from collections.abc import Sequence

AUGMENTATIONS = ("none", "crop_flip", "deit")


class Augmentation(nn.Module):
    """Images (B, C, H', W') in [0, 1] -> images (B, C, H, W).

    Args:
        name: one of ``AUGMENTATIONS``.
        size: (H, W); "none" cuts it out of the middle.
        random_erasing: probability that a rectangle of an image becomes noise.
    """

    def __init__(self, name: str, size: Sequence[int], random_erasing: float = 0.0) -> None:
        super().__init__()
        if name not in AUGMENTATIONS:
            raise unknown("augmentation", name, AUGMENTATIONS)
        import kornia.augmentation as augmentation

        shape = (int(size[0]), int(size[1]))
        self.geometry = nn.Sequential()
        if name == "crop_flip":
            self.geometry.append(augmentation.RandomCrop(shape, padding=(shape[1] // 8, shape[0] // 8)))
        elif name == "deit":
            self.geometry.append(augmentation.RandomResizedCrop(shape, scale=(0.08, 1.0), resample="bicubic"))
        if name != "none":
            self.geometry.append(augmentation.RandomHorizontalFlip())
        self.name = name
        self.size = shape
        self.erasing = random_erasing

    @torch.no_grad()
    def forward(self, images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        """Augmented images, in [0, 1] but for the noise of random erasing.

        Args:
            images: (B, C, H', W'), at least as large as (H, W).
            mean: of the training images, (C,): the colour of what comes in from outside of an image.
            std: their deviation, (C,): the noise is normal with these two, as in DeiT's training.
        """
        if self.name == "none":
            images = images[(..., *middle(images.shape[-2:], self.size))]
        images = self.geometry(images).clamp(0, 1)  # bicubic interpolation overshoots
        if self.name == "deit":
            images = rand_augment(images, mean)
        return _erase(images, self.erasing, mean, std) if self.erasing else images


class Mixed(NamedTuple):
    """images (B, C, H, W), and targets (B, classes), one distribution each."""

    images: Tensor
    targets: Tensor


def mix(
    images: Tensor, target: Tensor, classes: int, mixup: float, cutmix: float, smoothing: float = 0.0
) -> Mixed:
    """Mixup (Zhang et al. 2018) or cutmix (Yun et al. 2019) of a batch with itself reversed.

    Args:
        images: (B, C, H, W).
        target: (B,) class numbers.
        classes: number of classes.
        mixup: alpha of its Beta distribution; 0 switches it off.
        cutmix: the same; where both are on, either is drawn at even odds.
        smoothing: weight of the uniform distribution in the targets.
    """
    targets = F.one_hot(target, classes).to(images.dtype) * (1 - smoothing) + smoothing / classes
    if not mixup and not cutmix:
        return Mixed(images, targets)
    cuts = bool(cutmix) and (not mixup or bool(torch.rand(()) < 0.5))
    alpha = torch.tensor(cutmix if cuts else mixup)
    kept = float(torch.distributions.Beta(alpha, alpha).sample())
    if cuts:
        images, kept = _paste(images, kept)
    else:
        images = kept * images + (1 - kept) * images.flip(0)
    return Mixed(images, kept * targets + (1 - kept) * targets.flip(0))


def _paste(images: Tensor, kept: float) -> tuple[Tensor, float]:
    """Images with a rectangle of the reversed batch, and the share of the area that is their own."""
    height, width = images.shape[-2:]
    share = (1 - kept) ** 0.5
    tall, wide = int(height * share), int(width * share)
    middle_y, middle_x = int(torch.randint(height, ())), int(torch.randint(width, ()))
    top, left = max(middle_y - tall // 2, 0), max(middle_x - wide // 2, 0)
    bottom, right = min(middle_y + tall // 2, height), min(middle_x + wide // 2, width)
    pasted = images.clone()
    pasted[..., top:bottom, left:right] = images.flip(0)[..., top:bottom, left:right]
    return pasted, 1 - (bottom - top) * (right - left) / (height * width)


def _erase(images: Tensor, probability: float, mean: Tensor, std: Tensor) -> Tensor:
    """Noise in a rectangle of chosen images (Zhong et al. 2020): 2 to 33 % of the area, ratio 0.3 to 3.3."""
    count, _, height, width = images.shape
    area = torch.empty(count).uniform_(0.02, 1 / 3) * height * width
    ratio = torch.exp(torch.empty(count).uniform_(math.log(0.3), -math.log(0.3)))
    tall = (area * ratio).sqrt().round().clamp(1, height).int()
    wide = (area / ratio).sqrt().round().clamp(1, width).int()
    top = (torch.rand(count) * (height - tall + 1)).int()
    left = (torch.rand(count) * (width - wide + 1)).int()
    chosen = torch.rand(count) < probability
    rows, columns = torch.arange(height), torch.arange(width)
    inside = (
        ((rows >= top[:, None]) & (rows < (top + tall)[:, None]))[:, :, None]
        & ((columns >= left[:, None]) & (columns < (left + wide)[:, None]))[:, None, :]
        & chosen[:, None, None]
    )
    noise = mean[:, None, None] + std[:, None, None] * torch.randn(images.shape).to(images)
    return torch.where(inside[:, None].to(images.device), noise, images)
