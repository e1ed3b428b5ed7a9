"""Nearest-neighbour retrieval among real-valued keys, some of which are outliers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, NonNegative, Positive
from kernel_attention_lab.data.positions.task import PositionTask, distinct, unlabelled


@dataclass(frozen=True, kw_only=True)
class NoisyRetrieval(PositionTask):
    """The value of the stored key that is nearest to a query.

    Stored items come first: a key, entries N(0, 1 / channels), and its value, one of ``values`` classes. A
    query is the key of an item plus noise; its label is the value of the stored key with the least Euclidean
    distance. A share ``contamination`` of the keys, rounded to a whole number of them, is replaced by
    outliers: ``scale`` times a key drawn anew. Queries ask for the half of the items that is never replaced,
    so test sets that differ in ``contamination`` alone have the same queries and labels.

    Channels of a position: the key or the query, the value as one of ``values`` ones (zeros in a query), and
    1 in a query.

    The task is ours. Robust principal component attention splits the keys into a low-rank part and sparse
    outliers (Teo & Nguyen 2024), which is the reason for it.

    Args:
        length: positions, more than ``items``; those after the items are queries.
        items: stored items, at least 2.
        channels: entries of a key.
        values: classes.
        noise: of a query, relative to a key.
        contamination: share of the keys that is replaced, at most 0.5.
        scale: size of an outlier, relative to a key.
    """

    is_real: ClassVar[bool] = True

    length: Count = 32
    items: Count = 16
    channels: Count = 16
    values: Count = 8
    noise: NonNegative = 0.2
    contamination: Annotated[float, Field(ge=0, le=0.5, allow_inf_nan=False)] = 0.0
    scale: Positive = 10.0

    def check(self) -> None:
        if self.items < 2:
            raise InputError(f"items={self.items} must be at least 2")
        if self.length <= self.items:
            raise InputError(
                f"length={self.length} must be more than items={self.items}: the rest are queries"
            )

    @property
    def in_features(self) -> int:
        return self.channels + self.values + 1

    @property
    def num_outputs(self) -> int:
        return self.values

    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        items, channels, queries = self.items, self.channels, self.length - self.items
        every = np.arange(cases)[:, None]
        keys = self._vectors(generator, (cases, items))
        values = generator.integers(self.values, size=(cases, items))
        order = distinct(generator, cases, items, items)  # the first half is asked for
        asked = np.take_along_axis(
            order, generator.integers(items - items // 2, size=(cases, queries)), axis=1
        )
        asking = keys[every, asked] + np.float32(self.noise) * self._vectors(generator, (cases, queries))
        outliers = np.float32(self.scale) * self._vectors(generator, (cases, items))
        replaced = order[:, items - round(self.contamination * items) :]
        keys[every, replaced] = outliers[every, replaced]

        inputs = np.zeros((cases, self.length, self.in_features), dtype=np.float32)
        inputs[:, :items, :channels] = keys
        inputs[every, np.arange(items), channels + values] = 1.0
        inputs[:, items:, :channels] = asking
        inputs[:, items:, -1] = 1.0
        targets = unlabelled(cases, self.length)
        targets[:, items:] = np.take_along_axis(values, _nearest(keys, asking), axis=1)
        return inputs, targets

    def _vectors(self, generator: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
        drawn = generator.standard_normal((*shape, self.channels), dtype=np.float32)
        return drawn / np.float32(self.channels**0.5)


def _nearest(keys: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """The number of the nearest key (B, M, c) of every query (B, Q, c), (B, Q)."""
    wide, asking = keys.astype(np.float64), queries.astype(np.float64)
    squares = np.square(wide).sum(axis=-1)
    return np.argmin(squares[:, None, :] - 2 * asking @ wide.swapaxes(1, 2), axis=-1)
