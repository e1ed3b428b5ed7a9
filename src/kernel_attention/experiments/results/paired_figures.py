"""Figures that are no mean over the cases, with what comparing two models on the same cases needs of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from kernel_attention.experiments.robustness import precision_recall_area
from kernel_attention.experiments.statistics import LEVELS


class PairedFigure(ABC):
    """A figure of one model that follows from sums over its cases."""

    @abstractmethod
    def values(self) -> list[np.ndarray]:
        """For each kind of cases what is summed, (cases, values), float32."""

    @staticmethod
    @abstractmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The figure minus that of a baseline, (resamples,), from the sums of both, (resamples, values)."""


@dataclass(frozen=True, eq=False)
class CorruptionErrors(PairedFigure):
    """The mean corruption error relative to a baseline, whose own is 1.

    wrong: (corruptions, cases), the number of severities at which an image is wrong.
    """

    wrong: np.ndarray

    def values(self) -> list[np.ndarray]:
        """The errors of each image by corruption."""
        return [self.wrong.T.astype(np.float32)]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """Where the baseline makes no error under a corruption in a resample, half an error stands for it."""
        ratios: np.ndarray = (sums[0] / np.maximum(baseline[0], 0.5).astype(np.float64)).mean(axis=1)
        return ratios - 1


@dataclass(frozen=True, eq=False)
class Detection(PairedFigure):
    """The AUPR of a detector, from the levels of its scores (``score_levels``).

    known: (n,) levels of images of the classes.
    unseen: (m,) levels of images of no known class.
    """

    known: np.ndarray
    unseen: np.ndarray

    _AT_LEVEL: ClassVar[np.ndarray] = np.eye(LEVELS, dtype=np.float32)

    def values(self) -> list[np.ndarray]:
        """A one at each image's level."""
        return [self._AT_LEVEL[levels] for levels in (self.known, self.unseen)]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The difference of the areas under the precision-recall curves."""
        ours, theirs = (
            precision_recall_area(*(each.astype(np.float64) for each in found)) for found in (sums, baseline)
        )
        return ours - theirs
