"""The part of an image set that a file belongs to, and its class: from its path, or from a list."""

from __future__ import annotations

import csv
import io
import json
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from kernel_attention.containers import is_missing
from kernel_attention.errors import InputError
from kernel_attention_lab.data.splits import SPLITS, split_names

LIST_NAMES = ("val_annotations.txt", "metadata.csv", "metadata.jsonl")
"""Files that name the class of images: Tiny-ImageNet's, and those of Hugging Face's image folders."""


class Place(NamedTuple):
    """Where an image stands: the folder of its part, such as ``cifar10/train``, and its class folder."""

    part: str
    label: str | None


def place_of(path: str) -> Place:
    """The part and class of an image by its path.

    The part is the first folder that has the name of a split. The class is the folder below it, whatever
    stands deeper, as in ``train/CLASS/images/file``. In a path without the name of a split, the class is the
    image's own folder. The label is None where no folder is left for it, as in ``val/images/file``.
    """
    folders = path.split("/")[:-1]
    for depth, folder in enumerate(folders):
        if split_of(folder) is not None:
            below = folders[depth + 1 :]
            label = below[0] if below and below != ["images"] else None
            return Place("/".join(folders[: depth + 1]), label)
    if len(folders) > 1 and folders[-1] == "images":
        folders = folders[:-1]
    return Place("/".join(folders[:-1]), folders[-1] if folders else None)


def split_of(part: str) -> str | None:
    """``train``, ``validation`` or ``test`` by the last folder of a part; None for another folder."""
    folder = part.rpartition("/")[2].lower()
    return next((split for split in SPLITS if folder in split_names(split)), None)


def read_list(path: str, content: bytes, where: str) -> dict[str, str]:
    """The class of each image that a list names, by the image's path.

    A list without a column ``label``, or with a null there, names none: it may hold captions.

    Raises:
        InputError: where the list cannot be read, or a label is a missing value such as an empty cell or NaN.
    """
    folder = PurePosixPath(path).parent
    try:
        records = _records(path, content.decode("utf-8-sig"))
        return {
            (folder / record["file_name"]).as_posix(): _label(record)
            for record in records
            if record.get("label") is not None
        }
    except (ValueError, KeyError, TypeError, AttributeError, csv.Error, RecursionError) as error:
        reason = f"it has no {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{where}: {path} is not a list of images and classes ({reason})") from None


def _label(record: dict[str, Any]) -> str:
    label = str(record["label"])
    if is_missing(label):
        raise ValueError(f"{record['file_name']} has the label {label!r}, a missing value")
    return label


def _records(path: str, text: str) -> list[dict[str, Any]]:
    lines = [line for line in text.splitlines() if line.strip()]
    if path.endswith(".txt"):
        fields = [line.split("\t")[:2] for line in lines]
        return [{"file_name": f"images/{file}", "label": label} for file, label in fields]
    if path.endswith(".csv"):
        return list(csv.DictReader(io.StringIO(text)))
    return [json.loads(line) for line in lines]
