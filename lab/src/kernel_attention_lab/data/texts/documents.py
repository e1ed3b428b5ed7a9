"""Labelled texts: sentences of SST, reviews of IMDb, pairs of articles. Nothing is downloaded."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.data.splits import load_splits, split_names


class Documents(NamedTuple):
    """Texts of a split (pairs: tuples of two) and their class numbers."""

    texts: list[Any]
    labels: list[int]


def read_lines(path: Path) -> Iterator[tuple[int, str]]:
    """(number, text) of every line of a UTF-8 file, plain or ``.gz``, one at a time.

    Raises:
        InputError: for a file that is missing, empty, damaged, or not UTF-8.
    """
    count = 0
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            for count, line in enumerate(file, start=1):
                yield count, line.decode("utf-8-sig" if count == 1 else "utf-8").rstrip("\r\n")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise InputError(f"file {path}: byte 0x{byte:02x} in line {count} is not UTF-8") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"file {path}: cannot be read ({reason})") from None
    if not count:
        raise InputError(f"file {path}: is empty")


def read_labelled_lines(path: Path, classes: int) -> Documents:
    """Lines ``label text`` with a class number from 0, as SST is distributed (``stsa.*``)."""
    documents = Documents([], [])
    for number, line in read_lines(path):
        if not line.strip():
            continue
        label, _, text = line.partition(" ")
        if not (label.isdecimal() and len(label) < 10 and int(label) < classes) or not text.strip():
            raise InputError(
                f"file {path}: line {number} begins with {label[:20]!r}, expected a class from 0 to "
                f"{classes - 1} and a text"
            )
        documents.texts.append(text)
        documents.labels.append(int(label))
    return _filled(documents, path)


def read_jsonl(path: Path, classes: int = 2) -> Documents:
    """Lines ``{"text": ..., "label": ...}``, plain or ``.gz``."""
    documents = Documents([], [])
    for number, line in read_lines(path):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text, label = record["text"], record["label"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise InputError(f"file {path}: line {number} is not an object with text and label") from None
        _append(documents, text, label, classes, f"file {path}: line {number}")
    return _filled(documents, path)


def read_label_folders(folder: Path, names: tuple[str, ...]) -> Documents:
    """One text per file and one folder per class: ``neg/*.txt``, ``pos/*.txt``, as IMDb is distributed."""
    documents = Documents([], [])
    for label, name in enumerate(names):
        for path in sorted((folder / name).glob("*.txt")):
            text = "\n".join(line for _, line in read_lines(path))
            _append(documents, text, label, len(names), f"file {path}")
    return _filled(documents, folder)


def read_hugging_face(folder: Path, split: str, classes: int = 2) -> Documents:
    """A split of a data set that Hugging Face ``datasets`` saved with ``save_to_disk``: text and label."""
    splits = load_splits(folder)
    name = next((alias for alias in split_names(split) if alias in splits), None)
    if name is None:
        raise unknown(f"split of {folder}", split, list(splits))
    column = "text" if "text" in splits[name].column_names else "sentence"
    if not {column, "label"} <= set(splits[name].column_names):
        found = ", ".join(splits[name].column_names)
        raise InputError(f"dataset {folder}: split {name} has columns {found}, expected text and label")
    documents = Documents([], [])
    for number, (text, label) in enumerate(zip(splits[name][column], splits[name]["label"], strict=True)):
        _append(documents, text, label, classes, f"dataset {folder}: record {number} of {name}")
    return _filled(documents, folder)


def read_pairs(path: Path) -> Documents:
    """Lines ``label, id, id, text, text`` between tabs: the AAN pair files of the Long Range Arena release.

    The release writes the label as ``0.0`` or ``1.0`` and a text with bytes that are not UTF-8 as the text of
    a Python ``bytes`` literal. That text is read unchanged, as in the benchmark's own pipeline.
    """
    documents = Documents([], [])
    for number, line in read_lines(path):
        if not line:
            continue
        fields = line.split("\t")
        if len(fields) != 5 or fields[0] not in ("0", "1", "0.0", "1.0"):
            raise InputError(
                f"file {path}: line {number} has {len(fields)} fields and begins with {fields[0][:20]!r}, "
                "expected label (0.0 or 1.0), id1, id2, text1, text2 between tabs"
            )
        if not fields[3] or not fields[4]:
            raise InputError(f"file {path}: line {number} has an empty text")
        documents.texts.append((fields[3], fields[4]))
        documents.labels.append(int(float(fields[0])))
    return _filled(documents, path)


def _append(documents: Documents, text: Any, label: Any, classes: int, where: str) -> None:
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where} has no text")
    if not isinstance(label, int) or not 0 <= label < classes:
        raise InputError(f"{where} has the label {label!r}, expected 0 to {classes - 1}")
    documents.texts.append(text)
    documents.labels.append(label)


def _filled(documents: Documents, place: Path) -> Documents:
    if not documents.texts:
        raise InputError(f"{place}: is empty: it has no labelled text")
    return documents
