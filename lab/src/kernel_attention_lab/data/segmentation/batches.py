"""Batches of images with their label maps: random crops for training, whole images in order for evaluation.

The random numbers of a crop depend on (seed, epoch, case) alone. So a resumed run sees the crops of an
uninterrupted one, whatever process reads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset, Sampler

from kernel_attention.errors import InputError
from kernel_attention.training.samplers import EpochSampler
from kernel_attention_lab.data.images.batches import ImageBatch, channels_first
from kernel_attention_lab.data.segmentation.sets import VOID, SegmentationSplit

SCALES = (0.5, 2.0)


def random_crop(
    image: np.ndarray,
    label: np.ndarray,
    size: tuple[int, int],
    fill: Sequence[int],
    generator: np.random.Generator,
) -> tuple[np.ndarray, np.ndarray]:
    """The image scaled by 0.5 to 2, cropped at random and mirrored at even odds, and its labels alike.

    Args:
        image: (H, W, 3) uint8.
        label: (H, W) uint8.
        size: height and width of the crop. A scaled image that is smaller is padded on the right and below.
        fill: the colour of the padding, whose labels are ``VOID``.
        generator: of the scale, the place and the mirror image.

    Returns:
        image (h, w, 3) and label (h, w), with (h, w) = ``size``.
    """
    scale = generator.uniform(*SCALES)
    scaled = [max(round(side * scale), 1) for side in label.shape]
    kept = [min(side, wanted) for side, wanted in zip(scaled, size, strict=True)]
    first = [int(generator.integers(whole - part + 1)) for whole, part in zip(scaled, kept, strict=True)]
    # The part of the unscaled image that the crop shows, as left, top, right, bottom.
    ratio = [side / whole for side, whole in zip(label.shape, scaled, strict=True)]
    box = (
        first[1] * ratio[1], first[0] * ratio[0],
        min((first[1] + kept[1]) * ratio[1], label.shape[1]),
        min((first[0] + kept[0]) * ratio[0], label.shape[0]),
    )  # fmt: skip
    pixels = np.empty((*size, 3), dtype=np.uint8)
    pixels[:] = np.asarray(fill, dtype=np.uint8)
    classes = np.full(size, VOID, dtype=np.uint8)
    shape = (kept[1], kept[0])
    crop = Image.fromarray(image).resize(shape, Image.Resampling.BILINEAR, box)
    pixels[: kept[0], : kept[1]] = np.asarray(crop)
    classes[: kept[0], : kept[1]] = np.asarray(
        Image.fromarray(label).resize(shape, Image.Resampling.NEAREST, box)
    )
    if generator.random() < 0.5:
        pixels, classes = pixels[:, ::-1], classes[:, ::-1]
    return pixels, classes


class _EpochCases(Sampler[tuple[int, int]]):
    """(epoch, case) in the order of an ``EpochSampler``."""

    def __init__(self, length: int, seed: int) -> None:
        self.order = EpochSampler(length, seed)
        self.set_epoch, self.skip = self.order.set_epoch, self.order.skip

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        epoch = self.order.epoch
        return ((epoch, case) for case in self.order)


class _Crops(Dataset[tuple[np.ndarray, np.ndarray]]):
    def __init__(
        self, split: SegmentationSplit, size: tuple[int, int], fill: Sequence[int], seed: int
    ) -> None:
        self.split, self.size, self.fill, self.seed = split, size, fill, seed

    def __getitem__(self, place: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
        epoch, case = place
        generator = np.random.default_rng([self.seed, epoch, case])
        return random_crop(self.split.images[case], self.split.labels[case], self.size, self.fill, generator)


class _Whole(Dataset[tuple[np.ndarray, np.ndarray]]):
    def __init__(self, split: SegmentationSplit) -> None:
        self.split = split

    def __getitem__(self, case: int) -> tuple[np.ndarray, np.ndarray]:
        return self.split.images[case], self.split.labels[case]


def make_crop_loader(
    split: SegmentationSplit,
    size: tuple[int, int],
    batch_size: int,
    *,
    fill: Sequence[int] = (0, 0, 0),
    seed: int = 0,
    num_workers: int = 0,
) -> DataLoader:
    """Training batches of ``ImageBatch``: one ``random_crop`` of every case an epoch.

    Args:
        split: the cases.
        size: height and width of the crops.
        batch_size: B.
        fill: of ``random_crop``.
        seed: of the order and the crops.
        num_workers: processes that read ahead.

    Raises:
        InputError: for an empty split.
    """
    if not len(split):
        raise InputError("split is empty: there are no images to make batches of")
    return DataLoader(
        _Crops(split, size, fill, seed),
        batch_size=batch_size,
        sampler=_EpochCases(len(split), seed),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=_stack,
        # Without this generator, every pass would draw a worker seed from the global one.
        generator=torch.Generator().manual_seed(seed),
    )


def make_whole_loader(split: SegmentationSplit, batch_size: int) -> DataLoader:
    """Every case once, in order, unchanged; up to ``batch_size`` neighbours of equal size are a batch."""
    # Images of equal label maps have equal sizes too, and an image may be made when it is asked for.
    alike = [
        list(group) for _, group in groupby(range(len(split)), key=lambda case: split.labels[case].shape)
    ]
    batches = [
        group[first : first + batch_size] for group in alike for first in range(0, len(group), batch_size)
    ]
    return DataLoader(
        _Whole(split),
        batch_sampler=batches,
        collate_fn=_stack,
        generator=torch.Generator().manual_seed(0),
    )


def _stack(cases: list[tuple[np.ndarray, np.ndarray]]) -> ImageBatch:
    images, labels = map(np.stack, zip(*cases, strict=True))
    return ImageBatch(channels_first(images), torch.from_numpy(labels))
