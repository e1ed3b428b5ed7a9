"""The images of a set and what is known of their classes, whatever the layout of its files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError
from kernel_attention_lab.data.images.cifar_batches import (
    CIFAR10,
    FOLDERS,
    CifarBatch,
    is_cifar_file,
    read_cifar_file,
)
from kernel_attention_lab.data.images.decoding import Content
from kernel_attention_lab.data.images.files import holds_file, is_image, read_file, read_files
from kernel_attention_lab.data.images.layouts import LIST_NAMES, place_of, read_list
from kernel_attention_lab.data.splits import load_splits

_CIFAR_FIRST = ("data_batch_1", "train")
_LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass
class Classes:
    """The classes of a source. It is complete when the last image has been read.

    by_path: the class of an image, by the image's path; the other images have that of ``place_of``.
    names: all classes, in their order; without it they are those of the images, sorted.
    folders: all folders.
    """

    by_path: dict[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()
    folders: list[str] = field(default_factory=list)

    def of(self, path: str) -> str | None:
        """The class of an image; None where it has none."""
        return self.by_path.get(path) or place_of(path).label


def read_cases(place: Path, classes: Classes) -> Iterator[tuple[str, Content]]:
    """(path, file or pixels) of every image of a set, in one pass.

    Args:
        place: a folder or an archive with ``SPLIT/CLASS/``, ``CLASS/``, lists of ``LIST_NAMES``, or the
            folders of CIFAR as torchvision has them; or a folder saved by Hugging Face's ``datasets``.
        classes: gets what is learnt of the classes on the way.

    Raises:
        InputError: for what ``read_files`` refuses, and for bad lists, CIFAR files and saved data sets.
    """
    if _is_saved(place):
        yield from _saved(place, classes)
        return
    numbers: list[tuple[str, int]] = []
    for path, content in read_files(place, _is_wanted):
        folder, _, name = path.rpartition("/")
        if content is None:
            classes.folders.append(path)
        elif is_image(name):
            yield path, content
        elif name in LIST_NAMES:
            classes.by_path |= read_list(path, content, str(place))
        elif (folder or place.name).rpartition("/")[2] in FOLDERS:
            found = read_cifar_file(name, content, f"{place}: {path}")
            if isinstance(found, CifarBatch):
                for number, (pixels, label) in enumerate(zip(found.images, found.labels, strict=True)):
                    numbers.append((f"{found.split}/{name}/{number}", label))
                    yield numbers[-1][0], pixels
            else:
                classes.names = found
    if numbers:
        _name_numbers(numbers, classes, place)


def holds_images(place: Path) -> bool:
    """Return whether a folder or an archive is an image set, as far as its first files tell."""
    if _is_saved(place):
        return any('"Image"' in path.read_text() for path in place.rglob("dataset_info.json"))
    return holds_file(place, lambda name: is_image(name) or name in _CIFAR_FIRST)


def _is_saved(place: Path) -> bool:
    return (place / "dataset_dict.json").is_file() or (place / "state.json").is_file()


def _is_wanted(name: str) -> bool:
    return is_image(name) or name in LIST_NAMES or is_cifar_file(name)


def _name_numbers(numbers: list[tuple[str, int]], classes: Classes, place: Path) -> None:
    classes.names = classes.names or CIFAR10
    for path, number in numbers:
        if not 0 <= number < len(classes.names):
            raise InputError(
                f"{place}: has class number {number}, but names for 0 to {len(classes.names) - 1} only"
            )
        classes.by_path[path] = classes.names[number]


def _saved(place: Path, classes: Classes) -> Iterator[tuple[str, Content]]:
    """The images of a data set saved by Hugging Face's ``datasets``, as ``SPLIT/number``."""
    import datasets

    found = load_splits(place)
    splits = dict(found) if isinstance(found, dict) else {"": found}
    for name, split in splits.items():
        features = split.features
        column = next((key for key, kind in features.items() if isinstance(kind, datasets.Image)), None)
        label = next((key for key in _LABEL_COLUMNS if key in features), None)
        if column is None or label is None:
            raise InputError(
                f"dataset {place}: {name or 'it'} has columns {', '.join(features)}, expected one of images "
                f"and {' or '.join(_LABEL_COLUMNS)}"
            )
        names = tuple(getattr(features[label], "names", None) or ())
        classes.names = classes.names or names
        rows = split.select_columns([column, label]).cast_column(column, datasets.Image(decode=False))
        for number, row in enumerate(rows):
            path = f"{name}/{number}" if name else str(number)
            if (value := _label(row[label], names)) is not None:
                classes.by_path[path] = value
            yield path, _file(row[column], f"dataset {place}: record {number} of {name or 'it'}")


def _label(value: Any, names: tuple[str, ...]) -> str | None:
    """The class; None where it is unknown, which Hugging Face writes as -1."""
    if isinstance(value, int) and names:
        return names[value] if 0 <= value < len(names) else None
    return None if value is None else str(value)


def _file(record: dict[str, Any] | None, where: str) -> bytes:
    if record is None:
        raise InputError(f"{where} has no image")
    if record["bytes"] is not None:
        return bytes(record["bytes"])
    try:
        return read_file(Path(record["path"]))
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
