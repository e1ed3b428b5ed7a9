"""Images with a class for every pixel, decoded once and mapped into memory.

Legend: n images of H x W pixels in red, green and blue.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernel_attention.errors import InputError, note
from kernel_attention_lab.data.images.sets import locate_images
from kernel_attention_lab.data.segmentation.cache import Pairs, cached_pairs
from kernel_attention_lab.data.segmentation.label_maps import VOID

_TEST_SHARE = 0.2  # of a set without splits


@dataclass(frozen=True, eq=False)
class SegmentationSplit:
    """Images and their labels; sizes may differ from case to case.

    images: n arrays (H, W, 3) uint8.
    labels: n arrays (H, W) uint8 of class numbers, ``VOID`` (255) where a pixel has no class.
    """

    images: Sequence[np.ndarray]
    labels: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        if len(self.images) != len(self.labels):
            raise InputError(f"a split has {len(self.images)} images but {len(self.labels)} label maps")

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        return zip(self.images, self.labels, strict=True)

    def subset(self, indices: Sequence[int] | np.ndarray) -> SegmentationSplit:
        """The cases at ``indices``, in that order; they share the memory of this split."""
        return SegmentationSplit([self.images[i] for i in indices], [self.labels[i] for i in indices])

    def evenly(self, cases: int) -> SegmentationSplit:
        """At most ``cases`` cases, evenly spaced; all of them for 0."""
        return self if not cases or cases >= len(self) else self.subset(even_places(len(self), cases))


@dataclass(frozen=True, eq=False)
class SegmentationData:
    """A named set; ``validation`` is None where it has only a training and a test split."""

    name: str
    train: SegmentationSplit
    validation: SegmentationSplit | None
    test: SegmentationSplit
    class_names: tuple[str, ...]


def load_segmentation(
    name: str, data_root: str | os.PathLike[str] | None = None, *, image_size: int = 0
) -> SegmentationData:
    """Images with label maps by name or path. They are decoded on first use and cached.

    The value in a label map is the number of a class. Pixels of 255 have no class, and neither have those of
    a class with the name ``void``; the other classes are numbered without it. The names stand in a file
    ``classes.txt``, one a line. A set whose name begins with ``camvid`` has CamVid's 11 classes and void. In
    ADE20K's release, which has a file ``objectInfo150.txt``, 0 is void. Otherwise the names are the numbers
    from 0 to the largest.

    A set of ``train`` and ``val`` without ``test`` has its ``val`` as test split. Of a set without splits, a
    fifth is the test split, drawn with seed 0, and a note says so.

    Args:
        name: a folder or an archive of the data root or of its folder ``images``, by its name without the
            suffix; or a path. Its folders are ``SPLIT/images`` and ``SPLIT/labels``, or ``images/SPLIT`` and
            ``labels/SPLIT``, or ``SPLIT`` and ``SPLITannot``; ``annotations`` and ``masks`` are labels too.
            An image and its labels have the same name but for the suffix.
        data_root: by default the folder in the environment variable KERNEL_ATTENTION_DATA.
        image_size: the short side of every image is resized to it, and so are the labels of the training
            split; the labels of the other splits keep their size. 0 resizes nothing.

    Raises:
        InputError: for a set that is not found, and for everything that is wrong with it.
    """
    place = locate_images(name, data_root)
    splits, class_names = cached_pairs(place, image_size)
    if len(class_names) < 2:
        raise InputError(f"{place}: has one class only, {class_names[0]!r} (accepted: at least two)")
    if set(splits) == {""}:
        return SegmentationData(name, *_drawn(splits[""], place), class_names)
    if "train" not in splits:
        raise InputError(f"{place}: has no images of a training split (it has: {', '.join(sorted(splits))})")
    validation = splits.get("validation")
    test = splits.get("test") or validation
    if test is None:
        raise InputError(f"{place}: has no images of a test or validation split")
    held = None if validation is None or test is validation else _split(validation)
    return SegmentationData(name, _split(splits["train"]), held, _split(test), class_names)


def even_places(count: int, cases: int) -> np.ndarray:
    """The numbers of at most ``cases`` of so many cases, evenly spaced; of all of them for 0."""
    chosen = min(cases or count, count)
    return np.linspace(0, count - 1, chosen).round().astype(np.int64)


def hold_out_pairs(
    split: SegmentationSplit, fraction: float, seed: int
) -> tuple[SegmentationSplit, SegmentationSplit]:
    """(the rest, a random ``fraction`` of at least one case), both in their order; a function of ``seed``.

    Raises:
        InputError: for a split of one case.
    """
    if len(split) < 2:
        raise InputError(f"a split of {len(split)} image has none to hold out")
    chosen = np.random.default_rng(seed).permutation(len(split))
    count = min(max(round(fraction * len(split)), 1), len(split) - 1)
    return split.subset(np.sort(chosen[count:])), split.subset(np.sort(chosen[:count]))


def _split(pairs: Pairs) -> SegmentationSplit:
    return SegmentationSplit(pairs.images, pairs.labels)


def _drawn(pairs: Pairs, place: Path) -> tuple[SegmentationSplit, None, SegmentationSplit]:
    note(
        f"{place}: has no test split; {_TEST_SHARE:.0%} of the images, drawn with seed 0, are its test split"
    )
    train, test = hold_out_pairs(_split(pairs), _TEST_SHARE, seed=0)
    return train, None, test


__all__ = ["VOID", "SegmentationData", "SegmentationSplit", "hold_out_pairs", "load_segmentation"]
