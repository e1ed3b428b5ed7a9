"""Questions about the number of ones in a sequence of bits: majority and parity.

The answer stands at the last position, a query token. A classifier that averages over all positions would
count the ones without any attention.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.data.positions.task import PositionTask, unlabelled

QUERY = 2


@dataclass(frozen=True, kw_only=True)
class BitCounting(PositionTask):
    """Independent fair bits, then the query token, whose label is a bit.

    Args:
        length: positions, the query's included.
    """

    def check(self) -> None:
        if self.length < 2:
            raise InputError(f"length={self.length} must be at least 2: a bit and the query")

    @property
    def in_features(self) -> int:
        return 3

    @abstractmethod
    def answer(self, ones: np.ndarray) -> np.ndarray:
        """The label for the number of ones."""

    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        inputs = generator.integers(2, size=(cases, self.length))
        inputs[:, -1] = QUERY
        targets = unlabelled(cases, self.length)
        targets[:, -1] = self.answer(inputs[:, :-1].sum(axis=1))
        return inputs, targets


@dataclass(frozen=True, kw_only=True)
class Majority(BitCounting):
    """The majority of zeros and ones. One soft attention head can answer (Merrill et al. 2022).

    Args:
        length: positions, an even number, so that there are no ties.
    """

    def check(self) -> None:
        super().check()
        if self.length % 2:
            raise InputError(f"length={self.length} must be even: an odd number of bits has no ties")

    def answer(self, ones: np.ndarray) -> np.ndarray:
        return (2 * ones > self.length - 1).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Parity(BitCounting):
    """The parity of the number of ones. Soft attention finds it hard over long inputs (Hahn 2020).

    Args:
        length: positions, the query's included.
    """

    def answer(self, ones: np.ndarray) -> np.ndarray:
        return ones % 2
