"""Images with their classes, and the splits of a set.

Legend: n images of H x W pixels in red, green and blue.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

from kernel_attention.errors import InputError

COPIED_BYTES = 1 << 30
"""A subset of images up to this size is a copy in memory; a larger one reads them where they are."""


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images and their classes.

    images: (n, H, W, 3) uint8; may be a read-only memory map, or the ``ImageRows`` of one.
    targets: class numbers, (n,) int64.
    """

    images: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        if self.images.ndim != 4 or self.images.shape[-1] != 3 or self.images.dtype != np.uint8:
            raise InputError(
                f"images have shape {self.images.shape} and type {self.images.dtype} "
                "(accepted: (n, height, width, 3) of uint8)"
            )
        if self.targets.shape != self.images.shape[:1]:
            raise InputError(
                f"a split has {len(self.images)} images but targets of shape {self.targets.shape}"
            )

    def __len__(self) -> int:
        return len(self.targets)

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageSplit._of, (_reference(self.images), self.targets)

    @staticmethod
    def _of(images: np.ndarray | Path, targets: np.ndarray) -> ImageSplit:
        return ImageSplit(_referred(images), targets)

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        """The images at ``indices``, in that order: copied, or beyond ``COPIED_BYTES`` as ``ImageRows``."""
        chosen = np.asarray(indices, dtype=np.int64)
        rows = ImageRows(self.images, chosen)
        # Readers of a split index and slice its images, which rows allow as arrays do.
        images = np.asarray(rows) if rows.nbytes <= COPIED_BYTES else cast(np.ndarray, rows)
        return ImageSplit(images, self.targets[chosen])

    def evenly(self, cases: int) -> ImageSplit:
        """At most ``cases`` images, evenly spaced; all of them for 0."""
        if not cases or cases >= len(self):
            return self
        return self.subset(np.linspace(0, len(self) - 1, cases).round().astype(np.int64))


class ImageRows:
    """Chosen images of an array, which are read when they are asked for. Indexing gives arrays.

    Args:
        images: (n, H, W, 3); other rows too.
        rows: the chosen images, of an integer type.
    """

    def __init__(self, images: np.ndarray, rows: np.ndarray) -> None:
        self._images = images
        self._rows = rows

    def __reduce__(self) -> tuple[Any, ...]:
        return ImageRows._of, (_reference(self._images), self._rows)

    @staticmethod
    def _of(images: np.ndarray | Path, rows: np.ndarray) -> ImageRows:
        return ImageRows(_referred(images), rows)

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (np.asarray(self._images[row]) for row in self._rows)

    def __getitem__(self, index: Any) -> np.ndarray:
        first, *rest = index if isinstance(index, tuple) else (index,)
        chosen = self._rows[first]
        images = np.asarray(self._images[chosen])
        return images[(slice(None),) * np.ndim(chosen) + tuple(rest)]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.asarray(self._images[self._rows], dtype=dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, H, W, 3)."""
        return (len(self._rows), *self._images.shape[1:])

    @property
    def ndim(self) -> int:
        """4."""
        return self._images.ndim

    @property
    def dtype(self) -> np.dtype:
        """That of the array below."""
        return self._images.dtype

    @property
    def size(self) -> int:
        """The number of values."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """The bytes that a copy takes."""
        return self.size * self.dtype.itemsize


def _reference(images: np.ndarray) -> np.ndarray | Path:
    """A file that is mapped as a whole by its path, so that loader workers map it too and get no copy."""
    if isinstance(images, np.memmap) and isinstance(images.base, mmap.mmap):
        return Path(str(images.filename))
    return images


def _referred(images: np.ndarray | Path) -> np.ndarray:
    return np.load(images, mmap_mode="r", allow_pickle=False) if isinstance(images, Path) else images


@dataclass(frozen=True, eq=False)
class ImageData:
    """A named image set; ``validation`` is None where it has only a training and a test split."""

    name: str
    train: ImageSplit
    validation: ImageSplit | None
    test: ImageSplit
    class_names: tuple[str, ...]
