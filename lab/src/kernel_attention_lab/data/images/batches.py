"""Batches of images, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from kernel_attention.errors import InputError
from kernel_attention.training.samplers import EpochSampler
from kernel_attention_lab.data.images.sets import ImageSplit


class ImageBatch(NamedTuple):
    """Images. A named tuple, so that it moves between devices as a whole.

    x: (B, C, H, W) uint8, which is a quarter of what floats take on the way to a device.
    target: (B,) int64 classes, or label maps (B, H', W') uint8, in evaluation perhaps of another size
        than the images.
    """

    x: Tensor
    target: Tensor

    @property
    def pixels(self) -> Tensor:
        """The images as floats in [0, 1]."""
        return self.x.float() / 255

    @property
    def arguments(self) -> tuple[Tensor]:
        """The model's arguments."""
        return (self.pixels,)


class RepeatedSampler(EpochSampler):
    """Every case ``repeats`` times in a row, as many cases an epoch as there are (Hoffer et al. 2020).

    One epoch sees a part of the cases, each in several augmented copies within a batch.

    Args:
        length: number of cases.
        repeats: copies of a case.
        seed: of the order.
    """

    def __init__(self, length: int, repeats: int, seed: int = 0) -> None:
        super().__init__(length, seed)
        self.repeats = repeats

    def __iter__(self) -> Iterator[int]:
        start, self._skipped = self._skipped, 0
        order = np.repeat(list(super().__iter__()), self.repeats)
        yield from order[start : self.length].tolist()


def channels_first(images: np.ndarray) -> Tensor:
    """Images (n, H, W, C) as a tensor of their own, (n, C, H, W)."""
    return torch.from_numpy(images.transpose(0, 3, 1, 2).copy())


def middle(shape: Sequence[int], size: Sequence[int]) -> tuple[slice, slice]:
    """The rows and columns in the middle of an image: of ``size`` = (H, W), in an image of (H', W')."""
    top, left = ((have - want) // 2 for have, want in zip(shape, size, strict=True))
    return slice(top, top + size[0]), slice(left, left + size[1])


def central(split: ImageSplit, size: Sequence[int]) -> ImageSplit:
    """The middle (H, W) of every image. It is a view where the images are an array."""
    if split.images.shape[1:3] == tuple(size):
        return split
    return ImageSplit(split.images[(slice(None), *middle(split.images.shape[1:3], size))], split.targets)


class _Images(Dataset[ImageBatch]):
    def __init__(self, split: ImageSplit, size: Sequence[int] | None) -> None:
        self.split = split
        self.window = middle(split.images.shape[1:3], size or split.images.shape[1:3])

    def __len__(self) -> int:
        return len(self.split)

    def __getitems__(self, indices: list[int]) -> ImageBatch:
        images = self.split.images[indices][(slice(None), *self.window)]
        return ImageBatch(channels_first(images), torch.from_numpy(self.split.targets[indices]))


def make_image_loader(
    split: ImageSplit,
    batch_size: int,
    *,
    size: Sequence[int] | None = None,
    shuffle: bool = False,
    repeats: int = 1,
    seed: int = 0,
    num_workers: int = 0,
) -> DataLoader:
    """A DataLoader of ``ImageBatch``.

    Args:
        split: the images.
        batch_size: B.
        size: (H, W) of the batches, the middle of the images; by default all of them.
        shuffle: draw the order from a sampler seeded by (seed, epoch), reachable as ``loader.sampler``.
        repeats: copies of an image in a row, for repeated augmentation; with ``shuffle``.
        seed: of the order.
        num_workers: processes that read ahead.

    Raises:
        InputError: for an empty split.
    """
    if not len(split):
        raise InputError("split is empty: there are no images to make batches of")
    cases = _Images(split, size)
    return DataLoader(
        cases,
        batch_size=batch_size,
        sampler=RepeatedSampler(len(cases), repeats, seed) if shuffle else SequentialSampler(cases),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=_as_made,
        # Without this generator, every pass would draw a worker seed from the global one.
        generator=torch.Generator().manual_seed(seed),
    )


def _as_made(batch: Any) -> Any:
    """A list of indices gives a whole batch; a function of the module, since spawned workers pickle it."""
    return batch
