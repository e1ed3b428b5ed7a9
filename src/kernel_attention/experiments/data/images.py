"""Images with classes, decoded once and mapped into memory.

Legend: n images of H x W pixels in red, green and blue.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.archive import resolve_root
from kernel_attention.experiments.data.image_cache import Part, cached_parts
from kernel_attention.experiments.data.image_files import ARCHIVE_SUFFIXES
from kernel_attention.experiments.data.image_layouts import split_of


@dataclass(frozen=True, eq=False)
class ImageSplit:
    """Images and their classes.

    images: (n, H, W, 3) uint8; may be a read-only memory map.
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
            raise InputError(f"a split has {len(self.images)} images but targets {self.targets.shape}")

    def __len__(self) -> int:
        return len(self.targets)

    def subset(self, indices: Sequence[int] | np.ndarray) -> ImageSplit:
        """The images at ``indices``, in that order, copied into memory."""
        chosen = np.asarray(indices, dtype=np.int64)
        return ImageSplit(np.asarray(self.images[chosen]), self.targets[chosen])

    def evenly(self, cases: int) -> ImageSplit:
        """At most ``cases`` images, evenly spaced; all of them for 0."""
        if not cases or cases >= len(self):
            return self
        return self.subset(np.linspace(0, len(self) - 1, cases).round().astype(np.int64))


@dataclass(frozen=True, eq=False)
class ImageData:
    """A named image set; ``validation`` is None where it has only a training and a test split."""

    name: str
    train: ImageSplit
    validation: ImageSplit | None
    test: ImageSplit
    class_names: tuple[str, ...]


def load_images(
    name: str,
    data_root: str | os.PathLike[str] | None = None,
    *,
    image_size: int = 0,
    workers: int | None = None,
) -> ImageData:
    """An image set by name or path. It is decoded on first use and cached.

    Args:
        name: a folder or an archive of the data root or of its folder ``images``, by its name without the
            suffix; or a path. Its images stand in ``SPLIT/CLASS/``. A set of ``train`` and ``val`` without
            ``test`` has its ``val`` as test split.
        data_root: by default the folder in the environment variable KERNEL_ATTENTION_DATA.
        image_size: the short side is resized to it and the middle is cut out; 0 keeps the images' own size,
            which must be the same for all.
        workers: processes that decode, of ``decode_images``.

    Raises:
        InputError: for a set that is not found, and for everything that is wrong with it.
    """
    place = find_images(name, data_root)
    parts = {split: part for folder, part in cached_parts(place, image_size, workers).items()
             if (split := split_of(folder))}  # fmt: skip
    if "train" not in parts:
        raise InputError(f"{place}: has no folder train/CLASS with images")
    validation = parts.get("validation")
    test = parts.get("test") or validation
    if test is None:
        raise InputError(f"{place}: has no folder test/CLASS or val/CLASS with images")
    class_names = parts["train"].class_names
    if len(class_names) < 2:
        raise InputError(f"{place}: has one class only, {class_names[0]!r} (accepted: at least two)")
    train = ImageSplit(parts["train"].images, parts["train"].targets)
    held = (
        None
        if validation is None or test is validation
        else _aligned(validation, class_names, place, "validation")
    )
    return ImageData(name, train, held, _aligned(test, class_names, place, "test"), class_names)


def _aligned(part: Part, class_names: tuple[str, ...], place: Path, split: str) -> ImageSplit:
    """The split of a part with its class numbers as in training."""
    numbers = {label: number for number, label in enumerate(class_names)}
    unseen = [label for label in part.class_names if label not in numbers]
    if unseen:
        raise InputError(
            f"{place}: the {split} split has classes unseen in training: {', '.join(unseen[:5])}"
        )
    table = np.array([numbers[label] for label in part.class_names], dtype=np.int64)
    return ImageSplit(part.images, table[part.targets])


def find_images(name: str, data_root: str | os.PathLike[str] | None = None) -> Path:
    """The folder or archive of an image set.

    Raises:
        InputError: where there is none.
    """
    root = resolve_root(data_root)
    places = [] if root is None else [root / "images", root]
    for folder in places:
        for path in (folder / name, *(folder / f"{name}{suffix}" for suffix in ARCHIVE_SUFFIXES)):
            if path.exists():
                return path
    path = Path(name).expanduser()
    if path.exists():
        return path
    looked = " and ".join(map(str, places)) or "no data root was given"
    raise InputError(
        f"dataset {name!r}: no such folder or archive (looked in {looked}; set --data_root or "
        "KERNEL_ATTENTION_DATA, or give a path)"
    )
