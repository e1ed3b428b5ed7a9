"""Label maps: images whose values are classes. Their files, their names, and which classes a set has."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.images.decoding import opened_image
from kernel_attention_lab.data.images.layouts import split_of

VOID = 255
"""The label of a pixel that has no class."""

CLASS_LISTS = ("classes.txt", "objectInfo150.txt")
"""Files that name the classes: one name a line, and the table of ADE20K's release."""

LABEL_SUFFIXES = (".bmp", ".gif", ".png", ".ppm", ".tif", ".tiff")  # without loss

_CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist",
    "void",
)  # fmt: skip
_IMAGE_FOLDERS = ("images", "image", "imgs")
_LABEL_FOLDERS = ("labels", "label", "annotations", "annotation", "masks", "mask")
_LABEL_ENDING = "annot"
_SPLITS = {"training": "train", "testing": "test"}


class PairFile(NamedTuple):
    """A file of a set: an image or a label map, of which split ("" for none), and the pair's name."""

    is_label: bool
    split: str
    name: str


def pair_file(path: str) -> PairFile | None:
    """The place of an image in its set by its path; None where it stands in no folder of images or labels."""
    *folders, file = path.split("/")
    is_label: bool | None = None
    split, below = "", 0
    for depth, folder in enumerate(folder.lower() for folder in folders):
        ending = folder.endswith(_LABEL_ENDING)
        bare = folder.removesuffix(_LABEL_ENDING).rstrip("_-")
        known = split_of(_SPLITS.get(bare, bare))
        if known is not None and not split:
            split, below = known, depth + 1
            is_label = True if ending else is_label
        elif folder in _LABEL_FOLDERS or folder in _IMAGE_FOLDERS:
            is_label, below = folder in _LABEL_FOLDERS, depth + 1
    if is_label is None and not split:
        return None
    stem = file.rpartition(".")[0]
    return PairFile(bool(is_label), split, "/".join([*folders[below:], stem]))


class LabelClasses(NamedTuple):
    """The classes of a set.

    names: of the classes, without void.
    table: (256,) int16: what a value of a label map becomes; -1 where it is no label.
    accepted: the values, in words.
    """

    names: tuple[str, ...]
    table: np.ndarray
    accepted: str


def classes_of(names: list[str] | None) -> LabelClasses:
    """The classes with these names in the order of their values; any value where there are no names."""
    if names is None:
        return LabelClasses((), np.arange(256, dtype=np.int16), "0 to 255")
    table = np.full(256, -1, dtype=np.int16)
    table[VOID] = VOID
    kept = [value for value, name in enumerate(names) if name != "void"]
    table[: len(names)] = VOID
    table[kept] = np.arange(len(kept))
    return LabelClasses(
        tuple(names[value] for value in kept), table, f"0 to {len(names) - 1}, and {VOID} for void"
    )


def class_names_of(stem: str, lists: dict[str, bytes], where: str) -> list[str] | None:
    """The names of a set's classes by value, void among them; None where nothing names them.

    Args:
        stem: the name of the set's folder or archive.
        lists: content of the files of ``CLASS_LISTS`` in it, by name.
        where: names the set in errors.

    Raises:
        InputError: for a list that is not UTF-8, is empty, or too long.
    """
    if "classes.txt" in lists:
        names = _lines(lists["classes.txt"], f"{where}: classes.txt")
    elif "objectInfo150.txt" in lists:
        lines = _lines(lists["objectInfo150.txt"], f"{where}: objectInfo150.txt")[1:]
        # Index, ratio, training and validation images, whether stuff, and names separated by commas.
        names = ["void", *(line.split("\t")[-1].partition(",")[0].strip() for line in lines)]
    elif stem.lower().startswith("camvid"):
        return list(_CAMVID)
    else:
        return None
    if not 1 <= len(names) <= VOID:
        raise InputError(f"{where}: its list has {len(names)} classes (accepted: 1 to {VOID})")
    return names


def _lines(content: bytes, where: str) -> list[str]:
    try:
        return [line.strip() for line in content.decode("utf-8-sig").splitlines() if line.strip()]
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: is not UTF-8 ({error.reason} at byte {error.start})") from None


def decode_labels(content: bytes, where: str, classes: LabelClasses) -> np.ndarray:
    """The class numbers of a label map, (H, W) uint8.

    Raises:
        InputError: for a file that is no image, a coloured one, and a value that is no class.
    """
    with opened_image(content, where) as image:
        mode, values = image.mode, np.asarray(image)
    if values.ndim != 2 or mode == "F":
        raise InputError(
            f"{where}: is an image of mode {mode}; accepted: one class number a pixel (8-bit gray or palette)"
        )
    found = np.unique(values).astype(np.int64)
    wrong = [value for value in found.tolist() if not 0 <= value < 256 or classes.table[value] < 0]
    if wrong:
        raise InputError(f"{where}: has label {wrong[0]} (accepted: {classes.accepted})")
    return classes.table[values.astype(np.uint8)].astype(np.uint8)
