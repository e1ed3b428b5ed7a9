"""Decoded images and label maps on disk: one flat file of pixels, one of labels, and an index of the cases.

The cases of a set may differ in size, so an array with an axis of cases could not hold them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple, overload

import numpy as np

from kernel_attention.errors import InputError, note, note_once
from kernel_attention.files import cache_folder
from kernel_attention.limits import require_memory
from kernel_attention_lab.data.images.cache import cache_name, cached_folder
from kernel_attention_lab.data.images.decoding import decode_image
from kernel_attention_lab.data.images.files import read_files, read_images
from kernel_attention_lab.data.segmentation.label_maps import (
    CLASS_LISTS,
    LABEL_SUFFIXES,
    VOID,
    LabelClasses,
    PairFile,
    class_names_of,
    classes_of,
    decode_labels,
    pair_file,
)

_VERSION = 1  # of the format and of the decoding
_NOTE_EVERY = 30.0  # seconds
_INDEX, _PIXELS, _LABELS = "index.json", "pixels.bin", "labels.bin"


class RaggedArrays(Sequence[np.ndarray]):
    """uint8 arrays of different shapes in one flat array, of which they are views.

    Args:
        flat: (total,) uint8.
        places: the start of every array and its shape, (n, 1 + number of axes).
    """

    def __init__(self, flat: np.ndarray, places: np.ndarray) -> None:
        self.flat, self.places = flat, places

    def __len__(self) -> int:
        return len(self.places)

    @overload
    def __getitem__(self, index: int) -> np.ndarray: ...
    @overload
    def __getitem__(self, index: slice) -> RaggedArrays: ...
    def __getitem__(self, index: int | slice) -> np.ndarray | RaggedArrays:
        if isinstance(index, slice):
            return RaggedArrays(self.flat, self.places[index])
        start, *shape = self.places[index].tolist()
        return self.flat[start : start + int(np.prod(shape))].reshape(shape)


class Pairs(NamedTuple):
    """The cases of a split: images (H, W, 3) and label maps (H, W), uint8."""

    images: RaggedArrays
    labels: RaggedArrays


def cached_pairs(place: Path, image_size: int = 0) -> tuple[dict[str, Pairs], tuple[str, ...]]:
    """The splits of a folder or an archive, and the names of the classes; from the cache, made where needed.

    Raises:
        InputError: for what ``read_files`` and the decoders refuse, an image without labels or labels without
            an image, two of one name, sizes that differ, and a cache that cannot be written.
    """
    name = cache_name(place, f"{_VERSION} {image_size}", str(image_size or "own"))
    return cached_folder(
        cache_folder() / "segmentation" / name, _read, lambda new: _build(place, new, image_size)
    )


def _read(folder: Path) -> tuple[dict[str, Pairs], tuple[str, ...]] | None:
    """The content of a cache; None where it is missing or damaged."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        pixels, labels = (np.memmap(folder / name, np.uint8, mode="r") for name in (_PIXELS, _LABELS))
        splits = {
            split: Pairs(_arrays(pixels, entry["images"]), _arrays(labels, entry["labels"]))
            for split, entry in index["splits"].items()
        }
        return splits, tuple(index["class_names"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        note_once(f"cache {folder} is damaged ({error}) and made again")
        return None


def _arrays(flat: np.ndarray, places: list[list[int]]) -> RaggedArrays:
    found = np.array(places, dtype=np.int64)
    if (found < 0).any() or (found[:, 0] + found[:, 1:].prod(axis=1)).max() > len(flat):
        raise ValueError("its index leads out of its files")
    return RaggedArrays(flat, found)


def _build(place: Path, folder: Path, image_size: int) -> None:
    classes = classes_of(_class_names(place))
    with (folder / _PIXELS).open("wb") as pixels, (folder / _LABELS).open("wb") as labels:
        store = _Store(place, classes, image_size, pixels, labels)
        begun = noted = time.monotonic()
        for count, (path, content) in enumerate(read_images(place), start=1):
            store.add(path, content)
            if time.monotonic() - noted > _NOTE_EVERY:
                noted = time.monotonic()
                note(f"{place}: {count:,} images and label maps decoded in {noted - begun:.0f} s")
        splits = store.splits()
    names = classes.names or [str(value) for value in range(store.largest + 1)]
    text = json.dumps({"source": str(place), "class_names": names, "splits": splits})
    (folder / _INDEX).write_text(text, encoding="utf-8")


def _class_names(place: Path) -> list[str] | None:
    files = read_files(place, lambda name: name in CLASS_LISTS)
    lists = {path.rpartition("/")[2]: content for path, content in files if content is not None}
    return class_names_of(place.name.partition(".")[0], lists, str(place))


class _Store:
    """Writes images and label maps in the order they come, and pairs them at the end."""

    def __init__(
        self, place: Path, classes: LabelClasses, image_size: int, pixels: IO[bytes], labels: IO[bytes]
    ) -> None:
        self.place, self.classes, self.image_size = place, classes, image_size
        self.files = {False: pixels, True: labels}
        self.found: dict[PairFile, tuple[str, list[int], tuple[int, ...]]] = {}
        self.largest = 0
        self.labelled: set[str] = set()  # splits with a pixel that has a class

    def add(self, path: str, content: bytes) -> None:
        """Decode a file and write it; one in no folder of images or labels is left out."""
        entry = pair_file(path)
        if entry is None:
            return
        if entry in self.found:
            raise InputError(f"{self.place}: {path} and {self.found[entry][0]} have the same name")
        where = f"{self.place}: {path}"
        if not entry.is_label:
            array = decode_image(content, where)
        elif not path.lower().endswith(LABEL_SUFFIXES):
            raise InputError(
                f"{where}: labels in a format that loses values (accepted: {', '.join(LABEL_SUFFIXES)})"
            )
        else:
            array = decode_labels(content, where, self.classes)
            known = array[array != VOID]
            if known.size:
                self.largest = max(self.largest, int(known.max()))
                self.labelled.add(entry.split)
        self._check_size(entry, path, array.shape[:2])
        own = array.shape[:2]
        if self.image_size and not (entry.is_label and entry.split in ("validation", "test")):
            array = _resized(array, self.image_size, where)
        file = self.files[entry.is_label]
        self.found[entry] = (path, [file.tell(), *array.shape], own)
        file.write(np.ascontiguousarray(array).data)

    def _check_size(self, entry: PairFile, path: str, size: tuple[int, ...]) -> None:
        partner = self.found.get(entry._replace(is_label=not entry.is_label))
        if partner is not None and partner[2] != size:
            sizes = [(path, size), (partner[0], partner[2])]
            said = " and ".join(f"{name} has {found[1]} x {found[0]} pixels" for name, found in sizes)
            raise InputError(f"{self.place}: {said}; an image and its labels must have the same size")

    def splits(self) -> dict[str, dict[str, list[list[int]]]]:
        """The places of the images and of their labels by split, in the order of names."""
        if not self.found:
            raise InputError(
                f"{self.place}: has no folders of images and labels (accepted: SPLIT/images and "
                "SPLIT/labels, or images/SPLIT and labels/SPLIT, or SPLIT and SPLITannot)"
            )
        for entry, (path, _, _) in self.found.items():
            if entry._replace(is_label=not entry.is_label) not in self.found:
                missing = "image" if entry.is_label else "label map"
                raise InputError(f"{self.place}: {path} has no {missing} of its name")
        for split in {entry.split for entry in self.found} - self.labelled:
            raise InputError(f"{self.place}: the {split or 'only'} split has no pixel with a class")
        found: dict[str, dict[str, list[list[int]]]] = {}
        for entry in sorted(self.found):
            lists = found.setdefault(entry.split, {"images": [], "labels": []})
            lists["labels" if entry.is_label else "images"].append(self.found[entry][1])
        return found


def _resized(array: np.ndarray, size: int, where: str) -> np.ndarray:
    """An image or a label map whose short side is ``size``: bilinear, or the nearest label."""
    from PIL import Image

    scale = size / min(array.shape[:2])
    height, width = (max(round(side * scale), size) for side in array.shape[:2])
    what = f"{where}: resized to {width} x {height} pixels"
    require_memory(what, 4 * height * width, "leave it out, or lower image_size")
    method = Image.Resampling.NEAREST if array.ndim == 2 else Image.Resampling.BILINEAR
    return np.asarray(Image.fromarray(array).resize((width, height), method))
