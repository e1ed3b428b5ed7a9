"""Token data sets by name: the places of their files, and their texts, images and expressions as tokens."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.data.archive import DatasetInfo, resolve_root
from kernel_attention_lab.data.splits import SPLITS, split_names
from kernel_attention_lab.data.texts.documents import (
    Documents,
    read_hugging_face,
    read_jsonl,
    read_label_folders,
    read_labelled_lines,
    read_pairs,
)
from kernel_attention_lab.data.texts.vocabulary import ByteVocabulary, Vocabulary, WordVocabulary
from kernel_attention_lab.data.tokens.lra_images import load_gray_images, locate_gray_images
from kernel_attention_lab.data.tokens.lra_listops import SHORT, Specification, load_listops
from kernel_attention_lab.data.tokens.lra_pathfinder import SMALL, ContourSizes, load_pathfinder
from kernel_attention_lab.data.tokens.sets import TokenData, TokenSplit


class Limits(NamedTuple):
    """The sizes in a recipe; 0 stands for the data set's own."""

    train_cases: int = 0
    evaluation_cases: int = 0
    min_count: int = 1
    max_vocabulary: int = 0


class LoadedTokens(NamedTuple):
    """A data set, and the texts of its test split where its tokens are words."""

    data: TokenData
    test_texts: list[str] | None = None


_NEGATIVE_POSITIVE = ("neg", "pos")
_REVIEWS = ("imdb", "aclImdb")
_RETRIEVAL = ("lra_release/lra_release/tsv_data", "tsv_data", "aan", "retrieval")
_SENTENCES = ("sst",)
_SST5 = ("very negative", "negative", "neutral", "positive", "very positive")


def load_tokens(
    dataset: str, data_root: str | os.PathLike[str] | None = None, limits: Limits | None = None
) -> LoadedTokens:
    """A data set of token sequences by name, from files on this machine.

    Args:
        dataset: a name of ``TOKEN_DATASETS``.
        data_root: by default the folder in the environment variable KERNEL_ATTENTION_DATA.
        limits: sizes.

    Raises:
        InputError: for an unknown name, and files that are missing or bad.
    """
    if dataset not in TOKEN_DATASETS:
        raise unknown("dataset of task tokens", dataset, TOKEN_DATASETS)
    root = resolve_root(data_root)
    limits = limits or Limits()
    loaded = TOKEN_DATASETS[dataset](root, limits)
    data = loaded.data
    cut = TokenData(
        data.name,
        data.train.evenly(limits.train_cases),
        data.validation and data.validation.evenly(limits.evaluation_cases),
        data.test.evenly(limits.evaluation_cases),
        data.vocabulary_size,
        data.max_len,
        data.class_names,
        data.vocabulary,
    )
    texts = loaded.test_texts
    if texts is not None and limits.evaluation_cases and limits.evaluation_cases < len(texts):
        places = np.linspace(0, len(texts) - 1, limits.evaluation_cases).round().astype(int)
        texts = [texts[place] for place in places]
    return LoadedTokens(cut, texts)


BREAK = r"<br\s*/?>"
"""The line break of web pages, which is no word."""

WORD = r"[^\W_]+(?:'[^\W_]+)*|'[^\W_]+|[^\w\s]|_"
"""A word of a text in lower case, or a punctuation mark."""


def encode_texts(
    texts: Sequence[str], labels: Sequence[int] | np.ndarray, vocabulary: Vocabulary
) -> TokenSplit:
    """Texts as a split; words are those of ``words_of``."""
    is_words = isinstance(vocabulary, WordVocabulary)
    sequences = [vocabulary.encode(words_of(text) if is_words else text) for text in texts]
    kind = np.uint8 if vocabulary.size <= 256 else np.int32
    return TokenSplit.of([sequence.astype(kind) for sequence in sequences], labels)


def words_of(text: str) -> str:
    """The words of a text for a vocabulary: lower case, with punctuation apart, in one line."""
    return " ".join(re.findall(WORD, re.sub(BREAK, " ", text.lower())))


def _listops(root: Path | None, limits: Limits, specification: Specification | None = None) -> LoadedTokens:
    cases = (limits.train_cases, limits.evaluation_cases)
    return LoadedTokens(load_listops(root, *cases, specification=specification))


def _pathfinder(root: Path | None, limits: Limits, specification: ContourSizes | None = None) -> LoadedTokens:
    cases = (limits.train_cases, limits.evaluation_cases)
    return LoadedTokens(load_pathfinder(root, *cases, specification))


def _image(root: Path | None, limits: Limits) -> LoadedTokens:
    return LoadedTokens(load_gray_images(root))


def _text(root: Path | None, limits: Limits) -> LoadedTokens:
    """Byte-level IMDb; the benchmark reads 4,000 bytes of a review."""
    train, test = (_imdb(root, split) for split in ("train", "test"))
    vocabulary = ByteVocabulary()
    splits = [encode_texts(part.texts, part.labels, vocabulary) for part in (train, test)]
    return LoadedTokens(
        TokenData(
            "lra/text", splits[0], None, splits[1], 256, 4000, ("negative", "positive"), vocabulary.state()
        )
    )


def _retrieval(root: Path | None, limits: Limits) -> LoadedTokens:
    """Byte-level pairs of articles of the ACL Anthology network, 4,000 bytes each."""
    folder = _find(root, _RETRIEVAL, "Retrieval")
    splits = {}
    for split in SPLITS:
        path = _split_file(folder, "lra/retrieval", split, "new_aan_pairs.{}.tsv")
        pairs = read_pairs(path)
        sequences = [np.frombuffer(text.encode(), np.uint8) for pair in pairs.texts for text in pair]
        splits[split] = TokenSplit.of(sequences, pairs.labels)
    return LoadedTokens(
        TokenData(
            "lra/retrieval", splits["train"], splits["validation"], splits["test"], 256, 4000,
            ("unrelated", "related"), ByteVocabulary().state(),
        )
    )  # fmt: skip


def _split_file(folder: Path, dataset: str, split: str, pattern: str) -> Path:
    """A split's file, whichever name of the split stands in the pattern's braces."""
    names = [pattern.format(alias) for alias in split_names(split)]
    path = next((folder / name for name in names if (folder / name).is_file()), None)
    if path is None:
        raise InputError(f"dataset {dataset}: {folder} has no {split} file ({' or '.join(names)})")
    return path


def _sst(root: Path | None, limits: Limits, kind: str, class_names: tuple[str, ...]) -> LoadedTokens:
    folder = _find(root, _SENTENCES, kind)
    parts = {}
    for split in SPLITS:
        path = _split_file(folder, kind, split, f"stsa.{kind}.{{}}")
        parts[split] = read_labelled_lines(path, len(class_names))
    name = "sst2" if kind == "binary" else "sst5"
    return _words(name, parts["train"], parts["validation"], parts["test"], class_names, limits)


def _sst2(root: Path | None, limits: Limits) -> LoadedTokens:
    return _sst(root, limits, "binary", ("negative", "positive"))


def _sst5(root: Path | None, limits: Limits) -> LoadedTokens:
    return _sst(root, limits, "fine", _SST5)


def _imdb_words(root: Path | None, limits: Limits) -> LoadedTokens:
    train, test = (_imdb(root, split) for split in ("train", "test"))
    return _words("imdb", train, None, test, ("negative", "positive"), limits)


def _words(
    name: str,
    train: Documents,
    validation: Documents | None,
    test: Documents,
    class_names: tuple[str, ...],
    limits: Limits,
) -> LoadedTokens:
    """Word-level tokens; the vocabulary is that of the training split."""
    text = " ".join(words_of(text) for text in train.texts)
    size = limits.max_vocabulary + 2 if limits.max_vocabulary else None  # <unk> and <eos> are not words
    vocabulary = WordVocabulary.from_text(text, min_count=limits.min_count, max_size=size)
    splits = [
        part and encode_texts(part.texts, part.labels, vocabulary) for part in (train, validation, test)
    ]
    assert splits[0] is not None
    assert splits[2] is not None
    longest = int(max(split.lengths.max() for split in splits if split is not None))
    data = TokenData(
        name, splits[0], splits[1], splits[2], vocabulary.size, longest, class_names, vocabulary.state()
    )
    return LoadedTokens(data, test.texts)


def _imdb(root: Path | None, split: str) -> Documents:
    """IMDb's reviews: ``imdb/SPLIT.jsonl(.gz)``, ``aclImdb/SPLIT/{neg,pos}``, or a Hugging Face folder."""
    folder = _find(root, _REVIEWS, "imdb")
    for path in (folder / f"{split}.jsonl.gz", folder / f"{split}.jsonl"):
        if path.is_file():
            return read_jsonl(path)
    if (folder / split / "neg").is_dir():
        return read_label_folders(folder / split, _NEGATIVE_POSITIVE)
    if (folder / "dataset_dict.json").is_file():
        return read_hugging_face(folder, split)
    raise InputError(
        f"dataset imdb: {folder} has no {split} split (accepted: {split}.jsonl.gz, {split}.jsonl, "
        f"{split}/neg and {split}/pos, or a folder saved by Hugging Face's datasets)"
    )


def _find(root: Path | None, names: Sequence[str], dataset: str) -> Path:
    places = [] if root is None else [root / name for name in names]
    for place in places:
        if place.is_dir():
            return place
    looked = f"looked for {', '.join(map(str, places))}" if places else "there is no data root to look in"
    raise InputError(
        f"dataset {dataset}: no folder {' or '.join(names)} ({looked}; set --data_root or "
        "KERNEL_ATTENTION_DATA)"
    )


_FOLDERS = {
    "imdb": _REVIEWS,
    "lra/pathfinder32": ("pathfinder32",),
    "lra/retrieval": _RETRIEVAL,
    "lra/text": _REVIEWS,
    "sst2": _SENTENCES,
    "sst5": _SENTENCES,
}
_GENERATED = ("lra/listops", "lra/pathfinder32")


def list_token_sets(data_root: str | os.PathLike[str] | None = None) -> list[DatasetInfo]:
    """The data sets of ``load_tokens`` that are on this machine or are generated, sorted by name."""
    root = resolve_root(data_root)
    found = []
    for name in sorted(TOKEN_DATASETS):
        if (place := _place(name, root)) is not None:
            found.append(DatasetInfo(name, "data root", place))
        elif name in _GENERATED:
            found.append(DatasetInfo(name, "generated", None))
    return found


def _place(name: str, root: Path | None) -> Path | None:
    if name == "lra/image":
        with contextlib.suppress(InputError):
            return locate_gray_images(root)
    places = [] if root is None else [root / folder for folder in _FOLDERS.get(name, ())]
    return next((place for place in places if place.is_dir()), None)


TOKEN_DATASETS: dict[str, Callable[[Path | None, Limits], LoadedTokens]] = {
    "lra/listops": _listops,
    "lra/text": _text,
    "lra/retrieval": _retrieval,
    "lra/image": _image,
    "lra/pathfinder32": _pathfinder,
    "listops_100": partial(_listops, specification=SHORT),
    "pathfinder16": partial(_pathfinder, specification=SMALL),
    "sst2": _sst2,
    "sst5": _sst5,
    "imdb": _imdb_words,
}
