"""Copying tokens to the end of the sequence: from its beginning, or from random places."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.fields import Count
from kernel_attention_lab.data.positions.task import PositionTask, distinct, unlabelled

BLANK = 0  # the token between those to copy


@dataclass(frozen=True, kw_only=True)
class Copying(PositionTask):
    """Tokens to copy among blanks, then as many markers; the label of marker i is token i.

    Tokens to copy are 1 to ``vocabulary``, drawn independently; the marker is ``vocabulary`` + 1.

    Args:
        length: positions, at least 2 * ``items``.
        items: tokens to copy.
        vocabulary: different tokens to copy.
    """

    items: Count = 16
    vocabulary: Count = 16

    def check(self) -> None:
        if self.length < 2 * self.items:
            raise InputError(f"length={self.length} must be at least 2 * items = {2 * self.items}")

    @property
    def in_features(self) -> int:
        return self.vocabulary + 2

    @abstractmethod
    def places(self, cases: int, generator: np.random.Generator) -> np.ndarray:
        """Where the tokens stand, increasing, (cases, items), all before the markers."""

    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        tokens = generator.integers(1, self.vocabulary + 1, size=(cases, self.items))
        inputs = np.full((cases, self.length), BLANK, dtype=np.int64)
        np.put_along_axis(inputs, self.places(cases, generator), tokens, axis=1)
        inputs[:, -self.items :] = self.vocabulary + 1
        targets = unlabelled(cases, self.length)
        targets[:, -self.items :] = tokens
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class LongRangeCopy(Copying):
    """Copy the first tokens after a long blank (Hochreiter & Schmidhuber 1997; Arjovsky et al. 2016).

    The distance between a token and its copy is the same in all sequences of one length.

    Args:
        length: positions, at least 2 * ``items``.
        items: tokens to copy.
        vocabulary: different tokens to copy.
    """

    def places(self, cases: int, generator: np.random.Generator) -> np.ndarray:
        return np.broadcast_to(np.arange(self.items), (cases, self.items))


@dataclass(frozen=True, kw_only=True)
class SelectiveCopying(Copying):
    """Copy tokens from random places, in their order (Gu & Dao 2023, section 4.1.1; Jing et al. 2019).

    The published setting has 4096 positions before the markers, 16 tokens to copy and 16 different ones.

    Args:
        length: positions, at least 2 * ``items``.
        items: tokens to copy.
        vocabulary: different tokens to copy.
    """

    def places(self, cases: int, generator: np.random.Generator) -> np.ndarray:
        return np.sort(distinct(generator, cases, self.length - self.items, self.items), axis=1)
