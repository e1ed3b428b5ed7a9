"""The splits of a data set: their names, cases that are held out, and Hugging Face's ``save_to_disk``."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

import numpy as np

from kernel_attention.errors import InputError, unknown

SPLITS = ("train", "validation", "test")
"""The names of the splits; files and data sets may call the second dev, val, valid or eval."""

_ALIASES = {
    "validation": ("validation", "dev", "val", "valid", "eval"),
    "train": ("train",),
    "test": ("test",),
}


def split_names(split: str) -> tuple[str, ...]:
    """The names of a split in file names; InputError for an unknown split."""
    if split not in SPLITS:
        raise unknown("split", split, SPLITS)
    return _ALIASES[split]


class Labelled(Protocol):
    """Cases with classes: a ``TokenSplit`` or an ``ImageSplit``."""

    @property
    def targets(self) -> np.ndarray:
        """Class indices, (n,)."""

    def __len__(self) -> int: ...

    def subset(self, indices: np.ndarray, /) -> Self:
        """The cases at ``indices``, in that order."""


Split = TypeVar("Split", bound=Labelled)


def hold_out(split: Split, fraction: float, seed: int) -> tuple[Split, Split]:
    """(rest, held out): about ``fraction`` of every class, the same cases for the same seed.

    The cases of both keep their order. Every class of two or more cases has at least one on each side.

    Raises:
        InputError: where no class has two cases.
    """
    generator = np.random.default_rng(seed)
    held: list[int] = []
    for label in np.unique(split.targets):
        cases = generator.permutation(np.flatnonzero(split.targets == label))
        count = min(max(round(fraction * len(cases)), 1), len(cases) - 1)
        held += cases[:count].tolist()
    if not held:
        raise InputError(f"cannot hold out {fraction} of {len(split)} cases: no class has two cases")
    rest = np.setdiff1d(np.arange(len(split)), held)
    return split.subset(rest), split.subset(np.array(sorted(held)))


def load_splits(folder: Path) -> Any:
    """The splits of a saved data set by their names.

    Raises:
        InputError: where the library is missing, or cannot read the folder.
    """
    try:
        import datasets
    except ImportError:
        raise InputError(
            f"dataset {folder}: needs Hugging Face's datasets: pip install 'kernel-attention-lab[language]'"
        ) from None
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # the library lets through what Arrow raises
        raise InputError(f"dataset {folder}: not readable by Hugging Face's datasets ({error})") from None
