"""Image sets by name: their splits and classes. They are decoded once and mapped into memory.

Legend: n images of H x W pixels in red, green and blue.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError, nearest, note
from kernel_attention.files import expand_home
from kernel_attention_lab.data.archive import DatasetInfo, resolve_root
from kernel_attention_lab.data.images.cache import Part, cached_parts
from kernel_attention_lab.data.images.files import ARCHIVE_SUFFIXES
from kernel_attention_lab.data.images.layouts import split_of
from kernel_attention_lab.data.images.sources import holds_images
from kernel_attention_lab.data.images.splits import ImageData, ImageSplit
from kernel_attention_lab.data.splits import hold_out

__all__ = [
    "ClassSubset",
    "ImageData",
    "ImageSplit",
    "list_image_sets",
    "load_class_subset",
    "load_images",
    "locate_images",
]

# What a set is called where its authors or torchvision put it.
_OTHER_NAMES = {
    "cifar10": ("cifar-10-batches-py", "cifar-10-python"),
    "cifar100": ("cifar-100-python",),
    "tiny_imagenet": ("tiny-imagenet-200",),
}
_TEST_FRACTION = 0.2  # of a set without a test split
_TEST_SEED = 0
_FEW = 5  # class names in a message


class ClassSubset(NamedTuple):
    """A test set for a model that knows more classes.

    split: its images; targets are class numbers of the model.
    classes: the model's class numbers that occur in the set, sorted; to them its logits are restricted.
    """

    split: ImageSplit
    classes: np.ndarray


def load_images(
    name: str,
    data_root: str | os.PathLike[str] | None = None,
    *,
    image_size: int = 0,
    workers: int | None = None,
) -> ImageData:
    """An image set by name or path. It is decoded on first use and cached.

    It is a folder or an archive of ``SPLIT/CLASS/``, or of ``CLASS/`` alone; the layouts are those of
    ``read_cases``. A set with ``train`` and ``val`` but no ``test`` has its ``val`` as test split. A set with
    neither gets a test split of a fifth of each class, drawn with seed 0, and a note says so.

    Args:
        name: ``cifar10`` and the like: the file name without suffix, in the data root or in its folder
            ``images``; or a path.
        data_root: by default the folder in the environment variable KERNEL_ATTENTION_DATA.
        image_size: the short side is resized to it and the middle is cut out; 0 keeps the images' own size,
            which must be the same for all.
        workers: processes that decode, of ``decode_images``.

    Raises:
        InputError: for a set that is not found, and for everything that is wrong with it.
    """
    if image_size < 0:
        raise InputError(f"image_size={image_size} (accepted: 0 for the images' own size, or pixels)")
    place = locate_images(name, data_root)
    parts = cached_parts(place, image_size, workers)
    splits = _by_split(parts, place)
    train = splits["train"]
    class_names = train.class_names
    if len(np.unique(train.targets)) < 2:
        raise InputError(
            f"{place}: has one class only, {class_names[train.targets[0]]!r} (accepted: 2 or more)"
        )
    whole = ImageSplit(train.images, train.targets)
    held = {
        split: _aligned(part, class_names, f"{place}: the {split} split") for split, part in splits.items()
    }
    validation, test = held.get("validation"), held.get("test")
    if test is None:
        test, validation = validation, None
    if test is None:
        note(
            f"{place}: has no test split; {_TEST_FRACTION:.0%} of each class, drawn with seed {_TEST_SEED}, "
            "are its test split"
        )
        whole, test = hold_out(whole, _TEST_FRACTION, _TEST_SEED)
    return ImageData(name, whole, validation, test, class_names)


def load_class_subset(
    name: str,
    class_names: tuple[str, ...],
    data_root: str | os.PathLike[str] | None = None,
    *,
    image_size: int = 0,
    workers: int | None = None,
) -> ClassSubset:
    """A test set whose class folders are some of a model's classes, such as ImageNet-A, -R and -O.

    Args:
        name: a folder or archive of ``CLASS/`` (or ``test/CLASS/``), as in ``load_images``.
        class_names: the model's classes, in the order of its logits: for ImageNet its WordNet numbers.
        data_root: of ``load_images``.
        image_size: of ``load_images``.
        workers: of ``load_images``.

    Raises:
        InputError: where a class folder is none of the model's classes.
    """
    place = locate_images(name, data_root)
    parts = cached_parts(place, image_size, workers)
    tested = {part: found for part, found in parts.items() if split_of(part) == "test"} or parts
    if len(tested) != 1:
        raise InputError(
            f"{place}: has the folders {', '.join(sorted(tested))}; accepted: CLASS or test/CLASS"
        )
    split = _aligned(next(iter(tested.values())), class_names, f"{place}: it")
    return ClassSubset(split, np.unique(split.targets))


def _by_split(parts: dict[str, Part], place: Path) -> dict[str, Part]:
    splits: dict[str, Part] = {}
    folders: dict[str, str] = {}
    for folder, part in parts.items():
        split = split_of(folder)
        if split is not None and split in splits:
            raise InputError(f"{place}: {folders[split]} and {folder} are both its {split} split")
        if split is not None:
            splits[split], folders[split] = part, folder
    if not splits and len(parts) == 1:
        return {"train": next(iter(parts.values()))}
    if "train" not in splits:
        found = ", ".join(f"{folder}/" for folder in sorted(parts)) or "no labelled images"
        raise InputError(
            f"{place}: has no images in train/CLASS (it has {found}; accepted: also CLASS alone)"
        )
    return splits


def _aligned(part: Part, class_names: tuple[str, ...], what: str) -> ImageSplit:
    """The split of a part with the class numbers of ``class_names``."""
    numbers = {label: number for number, label in enumerate(class_names)}
    used = np.unique(part.targets)
    unseen = [part.class_names[label] for label in used if part.class_names[label] not in numbers]
    if unseen:
        shown = ", ".join([*unseen[:_FEW], *(["..."] if len(unseen) > _FEW else [])])
        raise InputError(f"{what} has classes unseen in training: {shown}")
    table = np.array([numbers.get(label, -1) for label in part.class_names], dtype=np.int64)
    return ImageSplit(part.images, table[part.targets])


def locate_images(name: str, data_root: str | os.PathLike[str] | None = None) -> Path:
    """The folder or archive of an image set.

    Raises:
        InputError: where there is none, or several archives carry the name.
    """
    root = resolve_root(data_root)
    places = [] if root is None else [root, root / "images"]
    for folder in places:
        for stem in (name, *_OTHER_NAMES.get(name, ())):
            candidates = [folder / stem, *(folder / f"{stem}{suffix}" for suffix in ARCHIVE_SUFFIXES)]
            if found := next((path for path in candidates if path.exists()), None):
                return found
    path = expand_home(name)
    if path.exists():
        return path
    near = nearest(name, [info.name for info in list_image_sets(root)])
    hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
    looked = f"looked in {' and '.join(map(str, places))}" if places else "there is no data root to look in"
    raise InputError(
        f"dataset {name!r}: no such folder or archive{hint} ({looked}; set --data_root or "
        "KERNEL_ATTENTION_DATA, or give a path)"
    )


def list_image_sets(data_root: str | os.PathLike[str] | None = None) -> list[DatasetInfo]:
    """The folders and archives with images in the data root and in its folder ``images``, sorted by name."""
    root = resolve_root(data_root)
    found: dict[str, DatasetInfo] = {}
    for folder in [] if root is None else [root, root / "images"]:
        for path in sorted(folder.iterdir()) if folder.is_dir() else []:
            suffix = next((end for end in ARCHIVE_SUFFIXES if path.name.endswith(end)), "")
            if path == folder / "images" or path.name.startswith(".") or not (suffix or path.is_dir()):
                continue
            name = path.name.removesuffix(suffix)
            if name not in found and holds_images(path):
                found[name] = DatasetInfo(name, "data root", path)
    return sorted(found.values(), key=lambda info: info.name.lower())
