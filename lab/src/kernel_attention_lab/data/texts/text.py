"""Texts with their splits, from text files or Hugging Face data sets on disk, and packed contexts.

Legend: T tokens of a text, L tokens of a context, C contexts.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError, reading, require_positive, unknown
from kernel_attention.files import expand_home
from kernel_attention_lab.data.archive import DatasetInfo, resolve_root
from kernel_attention_lab.data.splits import SPLITS, load_splits, split_names

IGNORED = -100
"""The target of positions that the loss ignores (PyTorch's ``ignore_index``)."""

_FILE_NAMES = ("{}.txt", "ptb.{}.txt", "wiki.{}.tokens", "wiki.{}.raw", "{}.tokens", "{}.raw")
_SUBFOLDERS = ("", "language")
_HELD_OUT = 0.05  # of the lines of a single file, for validation and for test each


@dataclass(frozen=True)
class TextData:
    """The text of every split.

    Args:
        name: name of the data set.
        train: the training text.
        validation: the text that selects the model.
        test: the test text, read once.
    """

    name: str
    train: str
    validation: str
    test: str

    def split(self, name: str) -> str:
        """The text of a split; InputError for an unknown one."""
        if name not in SPLITS:
            raise unknown("split", name, SPLITS)
        return str(getattr(self, name))


def load_text(dataset: str, data_root: str | os.PathLike[str] | None = None) -> TextData:
    """A language-modelling data set.

    Args:
        dataset: a path, or a name under the data root or its folder ``language``. It may be a folder with a
            text file a split (``train.txt``, ``valid.txt``, ``test.txt``, also ``ptb.train.txt``,
            ``wiki.train.tokens``), a folder that Hugging Face ``datasets`` saved (``save_to_disk``, column
            ``text``), or one text file, whose last 5 % of lines are the test and the 5 % before them the
            validation text.
        data_root: by default the folder in the environment variable KERNEL_ATTENTION_DATA.

    Raises:
        InputError: for a missing data set or split, an empty file, and bytes that are no UTF-8.
    """
    place = _locate(dataset, data_root)
    if place.is_file():
        texts = _split_lines(read_text(place), place)
    elif (place / "dataset_dict.json").is_file():
        texts = _read_hugging_face(place)
    else:
        texts = {split: read_text(_split_file(place, split)) for split in SPLITS}
    return TextData(place.stem, **texts)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a UTF-8 file; InputError where it is missing, empty or of another encoding."""
    path = Path(path)
    with reading(f"file {path}"):
        data = path.read_bytes()
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InputError(
            f"file {path}: byte 0x{data[error.start]:02x} at offset {error.start} (line {line}) is not UTF-8"
        ) from None
    if not text.strip():
        raise InputError(f"file {path}: is empty")
    return text.replace("\r\n", "\n")


def pack_contexts(tokens: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Cut a text into adjacent contexts, so that every token but the first is a target once.

    The last context is not padded. It starts inside the one before, and targets of that context are
    ``IGNORED`` here. A text shorter than a context is one context.

    Args:
        tokens: (T,), T at least 2.
        length: L.

    Returns:
        inputs and targets, (C, L) each: ``targets[c, i]`` is the token after ``inputs[c, i]``.

    Raises:
        InputError: for a text of fewer than two tokens or a length below 1.
    """
    tokens = np.asarray(tokens)
    if tokens.ndim != 1 or len(tokens) < 2:
        raise InputError(f"tokens has shape {tokens.shape}, expected (T,) with T at least 2")
    require_positive(length=length)
    count = len(tokens) - 1
    length = min(length, count)
    starts = np.arange(0, count - count % length, length)
    if count % length:
        starts = np.append(starts, count - length)
    places = starts[:, None] + np.arange(length)
    inputs, targets = tokens[places], tokens[places + 1].astype(np.int64)
    if count % length:
        targets[-1, : length - count % length] = IGNORED
    return inputs, targets


def list_texts(data_root: str | os.PathLike[str] | None = None) -> list[DatasetInfo]:
    """The folders of texts in the data root and in its folder ``language``, sorted by name."""
    root = resolve_root(data_root)
    found: dict[str, DatasetInfo] = {}
    for subfolder in _SUBFOLDERS:
        folder = Path() if root is None else root / subfolder
        for path in sorted(folder.iterdir()) if root is not None and folder.is_dir() else []:
            if path.is_dir() and (_has_text(path) or (path / "dataset_dict.json").is_file()):
                found.setdefault(path.name, DatasetInfo(path.name, "data root", path))
    return sorted(found.values(), key=lambda info: info.name.lower())


def _has_text(folder: Path) -> bool:
    return any((folder / pattern.format("train")).is_file() for pattern in _FILE_NAMES)


def _locate(dataset: str, data_root: str | os.PathLike[str] | None) -> Path:
    root = resolve_root(data_root)
    places = [] if root is None else [root / folder / dataset for folder in _SUBFOLDERS]
    for place in [*places, expand_home(dataset)]:
        if place.exists():
            return place
    looked = ", ".join(str(place) for place in [*places, dataset])
    raise InputError(
        f"dataset {dataset!r}: not found (looked for {looked}; set --data_root or KERNEL_ATTENTION_DATA)"
    )


def _split_file(folder: Path, split: str) -> Path:
    names = [pattern.format(alias) for pattern in _FILE_NAMES for alias in split_names(split)]
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise InputError(f"dataset {folder}: has no {split} text (accepted: {', '.join(names)})")


def _split_lines(text: str, path: Path) -> dict[str, str]:
    lines = text.splitlines(keepends=True)
    held = max(1, round(len(lines) * _HELD_OUT))
    if len(lines) < 2 * held + 1:
        raise InputError(f"file {path}: has {len(lines)} lines, at least 3 are needed to split it")
    parts = (lines[: -2 * held], lines[-2 * held : -held], lines[-held:])
    return {split: "".join(part) for split, part in zip(SPLITS, parts, strict=True)}


def _read_hugging_face(folder: Path) -> dict[str, str]:
    splits = load_splits(folder)
    return {split: _column(splits, split, folder) for split in SPLITS}


def _column(splits: Any, split: str, folder: Path) -> str:
    name = next((alias for alias in split_names(split) if alias in splits), None)
    if name is None:
        raise InputError(f"dataset {folder}: has no {split} split (it has {', '.join(splits)})")
    if "text" not in splits[name].column_names:
        columns = ", ".join(splits[name].column_names)
        raise InputError(f"dataset {folder}: split {name} has no column text (it has {columns})")
    # Records of WikiText include their line ends, those of PTB do not.
    text = "".join(line if line.endswith("\n") else line + "\n" for line in splits[name]["text"])
    if not text.strip():
        raise InputError(f"dataset {folder}: split {name} is empty")
    return text
