"""Token sequences with labels, stored end to end, their splits, and the cache of generated ones.

Legend: n cases, L_i tokens of sequence i, B cases of a batch, N tokens of its longest sequence.
"""

from __future__ import annotations

import logging
import math
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.files import write_atomically
from kernel_attention_lab.data.fetching import made_once, require_generation

logger = logging.getLogger(__name__)

_SHIFTS = 1  # the seed of the shifts of images


@dataclass(frozen=True, eq=False)
class TokenSplit:
    """Cases of one token sequence each, or of two (pairs).

    tokens: all sequences end to end, (sum of L_i,) of an integer type.
    offsets: where each sequence begins, and the end of the last, (sequences + 1,) int64.
    targets: class indices, (n,) int64. Case i of a split of pairs is sequences 2i and 2i + 1.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray

    def __post_init__(self) -> None:
        if len(self.offsets) - 1 not in (len(self.targets), 2 * len(self.targets)):
            raise InputError(
                f"a split has {len(self.offsets) - 1} sequences but {len(self.targets)} targets "
                "(accepted: one sequence a target, or two)"
            )

    @classmethod
    def of(cls, sequences: Sequence[np.ndarray], targets: Sequence[int] | np.ndarray) -> TokenSplit:
        """The split of these sequences."""
        offsets = np.zeros(len(sequences) + 1, dtype=np.int64)
        np.cumsum([len(sequence) for sequence in sequences], out=offsets[1:])
        tokens = np.concatenate(sequences) if len(sequences) else np.zeros(0, dtype=np.int64)
        return cls(tokens, offsets, np.asarray(targets, dtype=np.int64))

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def parts(self) -> int:
        """Sequences of a case: 1, or 2 for pairs."""
        return (len(self.offsets) - 1) // max(len(self.targets), 1)

    @property
    def lengths(self) -> np.ndarray:
        """L of every case, of its longer sequence where it has two, (n,)."""
        return np.diff(self.offsets).reshape(len(self), -1).max(axis=1)

    def case(self, index: int) -> list[np.ndarray]:
        """The sequences of a case, views into ``tokens``."""
        first = index * self.parts
        bounds = self.offsets[first : first + self.parts + 1]
        return [self.tokens[begin:end] for begin, end in pairwise(bounds)]

    def subset(self, indices: Sequence[int] | np.ndarray) -> TokenSplit:
        """The cases at ``indices``, in that order, copied."""
        chosen = [int(index) for index in indices]
        sequences = [sequence for index in chosen for sequence in self.case(index)]
        return TokenSplit.of(sequences, self.targets[np.asarray(chosen, dtype=np.int64)])

    def evenly(self, cases: int) -> TokenSplit:
        """At most ``cases`` cases, evenly spaced; all of them for 0."""
        if not cases or cases >= len(self):
            return self
        return self.subset(np.linspace(0, len(self) - 1, cases).round().astype(int))


@dataclass(frozen=True, eq=False)
class TokenData:
    """A named data set; ``validation`` is None where it has only a training and a test split.

    vocabulary_size: tokens are smaller than it.
    max_len: longest sequence that the task allows.
    vocabulary: how text becomes tokens, as plain values: ``{"kind": "byte"}`` or a word vocabulary's state;
        None where the tokens are not text.
    """

    name: str
    train: TokenSplit
    validation: TokenSplit | None
    test: TokenSplit
    vocabulary_size: int
    max_len: int
    class_names: tuple[str, ...]
    vocabulary: dict[str, Any] | None = None

    def fitted(self, max_len: int, truncate: bool) -> TokenData:
        """The data for a model of this ``max_len`` (0: the data set's own).

        Raises:
            InputError: for an empty split, a sequence without tokens, or a longer one unless ``truncate``.
        """
        limit = max_len or self.max_len
        splits: dict[str, Any] = {}
        for name in ("train", "validation", "test"):
            split = getattr(self, name)
            splits[name] = split and fit_length(split, limit, truncate, f"dataset {self.name}, {name} split")
        return replace(self, **splits, max_len=limit)


_IMAGES = ("lra/image", "lra/pathfinder32", "pathfinder16")


def shifted_images(data: TokenData) -> TokenData:
    """Square images, row by row, each with rows and columns shifted cyclically by numbers drawn for it alone.

    The numbers follow from the split and the place of the image in it.

    Raises:
        InputError: for a data set without square images.
    """
    if data.name not in _IMAGES:
        raise InputError(
            f"shift=True: dataset {data.name} has no square images (accepted: {', '.join(_IMAGES)})"
        )
    side = math.isqrt(data.max_len)
    splits: dict[str, Any] = {}
    for at, name in enumerate(("train", "validation", "test")):
        if split := getattr(data, name):
            images = split.tokens.reshape(-1, side, side)
            drawn = np.random.default_rng([_SHIFTS, at]).integers(side, size=(len(images), 2))
            shifted = [np.roll(image, shift, axis=(0, 1)) for image, shift in zip(images, drawn, strict=True)]
            splits[name] = replace(split, tokens=np.concatenate(shifted, axis=None))
    return replace(data, **splits)


def fit_length(split: TokenSplit, limit: int, truncate: bool, where: str) -> TokenSplit:
    """A split whose sequences have at most ``limit`` tokens; see ``TokenData.fitted``."""
    if not len(split):
        raise InputError(f"{where}: has no cases")
    lengths = np.diff(split.offsets)
    if lengths.min() < 1:
        case = int(lengths.argmin()) // split.parts
        raise InputError(f"{where}: case {case} has no tokens")
    if lengths.max() <= limit:
        return split
    if not truncate:
        case = int((lengths > limit).argmax())
        raise InputError(
            f"{where}: case {case // split.parts} has {lengths[case]} tokens, more than max_len={limit} "
            "(truncate: true cuts it)"
        )
    kept = np.arange(len(split.tokens)) - np.repeat(split.offsets[:-1], lengths) < limit
    offsets = np.concatenate([[0], np.cumsum(np.minimum(lengths, limit))])
    return TokenSplit(split.tokens[kept], offsets, split.targets)


def cached_arrays(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in an ``.npz`` file. If it is missing or damaged, they are made and written again.

    Raises:
        InputError: where the file cannot be written.
        NotGeneratedError: where they are missing, inside ``without_fetching``.
    """

    def write() -> None:
        logger.info("generating %s", path)
        arrays = make()
        write_atomically(path, lambda file: np.savez(file, allow_pickle=False, **arrays))

    arrays = _arrays_in(path)
    if arrays is None:
        require_generation(path)
        arrays = made_once(path, lambda: _arrays_in(path), write)
    return arrays


def _arrays_in(path: Path) -> dict[str, np.ndarray] | None:
    """None for a file that is missing or damaged."""
    try:
        # Opened here, because NumPy leaves a damaged file open.
        with path.open("rb") as content, np.load(content, allow_pickle=False) as file:
            return {name: file[name] for name in file.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, KeyError, MemoryError):
        return None
