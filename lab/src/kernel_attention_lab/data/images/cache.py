"""Decoded images on disk: one array of pixels and one of class numbers for every part of an image set.

A cache is a folder that is whole or absent. It is made once, in one pass over the files, and then mapped into
memory. Its name holds where the source lies, and the sizes and times of its files, so that another source of
the same name is not taken for it, and one that changed is read again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from kernel_attention.errors import InputError, note, note_once
from kernel_attention.files import cache_folder
from kernel_attention_lab.data.fetching import made_once
from kernel_attention_lab.data.images.decoding import decode_images
from kernel_attention_lab.data.images.files import IMAGE_SUFFIXES, file_stamps
from kernel_attention_lab.data.images.layouts import place_of
from kernel_attention_lab.data.images.sources import Classes, read_cases

_VERSION = 1  # of the format and of the decoding
_NOTE_EVERY = 30.0  # seconds
_INDEX = "index.json"

Content = TypeVar("Content")


class Part(NamedTuple):
    """A part of an image set. images: (n, H, W, 3) uint8, a read-only memory map; targets: (n,) int64."""

    images: np.ndarray
    targets: np.ndarray
    class_names: tuple[str, ...]


def cached_parts(place: Path, image_size: int = 0, workers: int | None = None) -> dict[str, Part]:
    """The parts of a folder or an archive by their folders; from the cache, which is made first where needed.

    Images without a class are left out. A cache that is damaged is made again.

    Raises:
        InputError: for what ``read_files`` and ``decode_image`` refuse, images of different sizes where
            ``image_size`` is 0, and a cache that cannot be written.
    """
    name = cache_name(place, f"{_VERSION} {image_size}", str(image_size or "own"))
    return cached_folder(
        cache_folder() / "images" / name, _open, lambda new: _build(place, new, image_size, workers)
    )


def _open(folder: Path) -> dict[str, Part] | None:
    """The parts of a cache; None where it is missing or damaged."""
    try:
        index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
        parts = {}
        for name, entry in index["parts"].items():
            images = np.load(folder / entry["images"], mmap_mode="r", allow_pickle=False)
            targets = np.load(folder / entry["targets"], allow_pickle=False)
            class_names = tuple(entry["class_names"])
            if (
                images.shape != tuple(entry["shape"])
                or images.dtype != np.uint8
                or targets.shape != images.shape[:1]
                or not 0 <= targets.min() <= targets.max() < len(class_names)
            ):
                raise ValueError(f"part {name} is not as described")
            parts[name] = Part(images, targets, class_names)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, EOFError, RecursionError) as error:
        note_once(f"cache {folder} is damaged ({error}) and made again")
        return None
    return parts


def _build(place: Path, folder: Path, image_size: int, workers: int | None) -> None:
    classes = Classes()
    writers: dict[str, _Writer] = {}
    first: tuple[str, tuple[int, ...]] | None = None
    begun = noted = time.monotonic()
    with contextlib.ExitStack() as stack:
        decoded = decode_images(read_cases(place, classes), str(place), image_size, workers)
        for count, (path, pixels) in enumerate(decoded, start=1):
            first = first or (path, pixels.shape)
            if pixels.shape != first[1]:
                raise _mixed_sizes(place, first, (path, pixels.shape))
            part = place_of(path).part
            if part not in writers:
                writer = _Writer(folder, len(writers), pixels.shape)
                writers[part] = stack.enter_context(contextlib.closing(writer))
            writers[part].add(path, pixels)
            if time.monotonic() - noted > _NOTE_EVERY:
                noted = time.monotonic()
                note(f"{place}: {count:,} images decoded in {noted - begun:.0f} s")
    if not writers:
        raise InputError(f"{place}: has no images (accepted: {', '.join(IMAGE_SUFFIXES)})")
    labels = {part: _labels(place, part, writer.paths, classes) for part, writer in writers.items()}
    _check_folders(place, classes.folders, labels)
    parts = {part: writer.finish(labels[part], classes.names) for part, writer in writers.items()}
    kept = {part: entry for part, entry in parts.items() if entry is not None}
    text = json.dumps({"version": _VERSION, "source": str(place), "parts": kept})
    (folder / _INDEX).write_text(text, encoding="utf-8")


def _mixed_sizes(
    place: Path, first: tuple[str, tuple[int, ...]], second: tuple[str, tuple[int, ...]]
) -> InputError:
    sizes = " and ".join(f"{path} has {shape[1]} x {shape[0]} pixels" for path, shape in (first, second))
    return InputError(f"{place}: {sizes}; image_size resizes all of them")


def _labels(place: Path, part: str, paths: list[str], classes: Classes) -> list[str]:
    """The class of every image of a part; none where no image has one."""
    labels = [classes.of(path) for path in paths]
    known = [label for label in labels if label is not None]
    if not known:
        note(f"{place}: the images of {part or 'the folder'} have no classes and are left out")
    elif len(known) < len(labels):
        raise InputError(f"{place}: {paths[labels.index(None)]} has no class, as other images of {part} have")
    return known


def _check_folders(place: Path, folders: list[str], labels: dict[str, list[str]]) -> None:
    """Refuse a class folder without images."""
    known = {part: set(found) for part, found in labels.items()}
    for folder in folders:
        part, label = place_of(f"{folder}/file")
        if label is not None and known.get(part) and label not in known[part]:
            raise InputError(f"{place}: class folder {folder} has no images")


class _Writer:
    """The arrays of one part. NumPy leaves room in the header for a first axis that grows."""

    def __init__(self, folder: Path, number: int, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self.paths: list[str] = []
        self.images = folder / f"{number}-images.npy"
        self.targets = folder / f"{number}-targets.npy"
        self.file = self.images.open("wb")
        self._write_header()

    def _write_header(self) -> None:
        header = {"descr": "|u1", "fortran_order": False, "shape": (len(self.paths), *self.shape)}
        np.lib.format.write_array_header_1_0(self.file, header)

    def add(self, path: str, pixels: np.ndarray) -> None:
        self.file.write(np.ascontiguousarray(pixels).data)
        self.paths.append(path)

    def close(self) -> None:
        """Finish the array of pixels."""
        self.file.seek(0)
        self._write_header()
        self.file.flush()
        os.fsync(self.file.fileno())
        self.file.close()

    def finish(self, labels: list[str], names: tuple[str, ...]) -> dict[str, Any] | None:
        """Write the class numbers; the part's entry in the index, or None where its images have no class."""
        if not labels:
            self.images.unlink()
            return None
        if not set(labels) <= set(names):
            names = tuple(sorted(set(labels)))
        numbers = {name: number for number, name in enumerate(names)}
        np.save(self.targets, np.array([numbers[label] for label in labels], dtype=np.int64))
        return {
            "images": self.images.name,
            "targets": self.targets.name,
            "shape": [len(labels), *self.shape],
            "class_names": names,
        }


def cached_folder(
    folder: Path, read: Callable[[Path], Content | None], build: Callable[[Path], None]
) -> Content:
    """The content of a cache, which is built first where it is missing or damaged.

    Args:
        folder: of the cache.
        read: the content of such a folder; None where it is missing or damaged.
        build: fills an empty folder.

    Raises:
        InputError: for a cache that cannot be written.
    """

    def make() -> None:
        with tempfile.TemporaryDirectory(prefix=".building-", dir=folder.parent) as temporary:
            new = Path(temporary) / "new"
            new.mkdir()
            build(new)
            _publish(new, folder, read)

    return made_once(folder, lambda: read(folder), make)


def cache_name(place: Path, settings: str, label: str) -> str:
    """The source's name, ``label``, and a hash of ``settings``, the source's place and its files' stamps."""
    source = place.resolve()
    digest = hashlib.sha256(f"{settings}\n{source}".encode(errors="backslashreplace"))
    for stamp in file_stamps(place):
        digest.update(f"\n{tuple(stamp)}".encode())
    stem = place.name.partition(".")[0] or source.name
    return f"{stem}-{label}-{digest.hexdigest()[:16]}"


def _publish(new: Path, folder: Path, read: Callable[[Path], object]) -> None:
    """Move a finished cache to its place.

    Where the file system has no locks, another process may have put a whole one there; that one stays.
    """
    for _ in range(2):
        try:
            os.rename(new, folder)
        except OSError:
            if read(folder) is not None:
                return
            os.rename(folder, new.parent / "damaged")
        else:
            return
    raise OSError(f"{folder} is taken")
