"""Generated tasks whose answers stand at single positions of a sequence, and their batches.

A batch is a function of the task's options and of whole numbers (a stream, a seed, a step), so a run that was
stopped sees the same batches as one that was not, and test sets need no files.

Legend: B cases of a batch, N positions of a sequence, c channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernel_attention.fields import Count, check_fields
from kernel_attention_lab.data.step_sampler import StepSampler
from kernel_attention_lab.data.texts.text import IGNORED

_STREAMS = {"train": 0, "validation": 1, "test": 2}


class PositionBatch(NamedTuple):
    """A batch. A named tuple, so that it moves between devices as a whole.

    inputs: (B, N) int64 tokens, or (B, N, c) float32.
    targets: (B, N) int64 classes, ``IGNORED`` without a label.
    """

    inputs: Tensor
    targets: Tensor

    @property
    def arguments(self) -> tuple[Tensor]:
        """The model's arguments."""
        return (self.inputs,)


@dataclass(frozen=True, kw_only=True)
class PositionTask(ABC):
    """A task with its options. The classes of a task on tokens are the tokens.

    Args:
        length: positions N.

    Raises:
        InputError: for a value out of range, and for options that do not fit together.
    """

    is_real: ClassVar[bool] = False
    """True where the inputs are vectors of numbers, not tokens."""

    length: Count = 64

    def __post_init__(self) -> None:
        check_fields(self)
        self.check()

    @abstractmethod
    def check(self) -> None:
        """InputError for options that do not fit together."""

    @property
    @abstractmethod
    def in_features(self) -> int:
        """The number of different tokens, or of channels."""

    @property
    def num_outputs(self) -> int:
        """Classes of a position."""
        return self.in_features

    @abstractmethod
    def draw(self, cases: int, generator: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Inputs (cases, N) int64 or (cases, N, c) float32, and targets (cases, N) int64."""

    def batch(self, cases: int, generator: np.random.Generator) -> PositionBatch:
        """``draw`` as tensors."""
        inputs, targets = self.draw(cases, generator)
        return PositionBatch(torch.from_numpy(inputs), torch.from_numpy(targets))

    def fixed(self, split: str, cases: int) -> PositionBatch:
        """The validation or the test set: the same cases on every call.

        Sets of one length start from one state of the generator, so that they differ by the options alone.
        """
        return self.batch(cases, np.random.default_rng([_STREAMS[split], self.length]))


Row = tuple[int, int]
"""(number of a batch, number of a case in it)."""


class StepRows(StepSampler[Row]):
    """The cases of every step of a round; steps are counted from the run's first."""

    per_epoch = 1

    def batches(self, epoch: int) -> list[list[Row]]:
        """One batch an epoch: the cases of the step of that number."""
        return [_rows(epoch, self.batch_size)]


class _GeneratedBatches(Dataset[PositionBatch]):
    """Batch number n is drawn from the generator of (seed, n): first its task, then its cases."""

    def __init__(self, tasks: Sequence[PositionTask], batch_size: int, seed: int) -> None:
        self.tasks, self.batch_size, self.seed = list(tasks), batch_size, seed

    def __getitem__(self, rows: list[Row]) -> PositionBatch:
        generator = np.random.default_rng([_STREAMS["train"], self.seed, rows[0][0]])
        task = self.tasks[generator.integers(len(self.tasks))]
        return _chosen(task.batch(self.batch_size, generator), rows)


class _FixedBatches(Dataset[PositionBatch]):
    def __init__(self, sets: Sequence[PositionBatch]) -> None:
        self.sets = list(sets)

    def __getitem__(self, rows: list[Row]) -> PositionBatch:
        return _chosen(self.sets[rows[0][0]], rows)


def _rows(batch: int, cases: int) -> list[Row]:
    return [(batch, case) for case in range(cases)]


def _chosen(batch: PositionBatch, rows: list[Row]) -> PositionBatch:
    cases = [case for _, case in rows]
    return PositionBatch(batch.inputs[cases], batch.targets[cases])


def training_positions(
    tasks: Sequence[PositionTask], batch_size: int, steps: int, seed: int
) -> DataLoader[PositionBatch]:
    """Rounds of ``steps`` new batches; each has the options of one of the tasks, drawn at random."""
    return _loader(_GeneratedBatches(tasks, batch_size, seed), StepRows(batch_size, steps))


def fixed_positions(
    tasks: Sequence[PositionTask], split: str, cases: int, batch_size: int
) -> DataLoader[PositionBatch]:
    """The validation or the test sets of the tasks, one after the other; see ``PositionTask.fixed``."""
    sets = [task.fixed(split, cases) for task in tasks]
    rows = [_rows(number, len(found.inputs)) for number, found in enumerate(sets)]
    batches = [each[start : start + batch_size] for each in rows for start in range(0, len(each), batch_size)]
    return _loader(_FixedBatches(sets), batches)


def unlabelled(cases: int, length: int) -> np.ndarray:
    """Targets (cases, length) without a label."""
    return np.full((cases, length), IGNORED, dtype=np.int64)


def distinct(generator: np.random.Generator, cases: int, values: int, count: int) -> np.ndarray:
    """``count`` different numbers below ``values`` for every case, in random order, (cases, count)."""
    return np.argsort(generator.random((cases, values)), axis=1)[:, :count]


def _loader(batches: Dataset[PositionBatch], sampler: Iterable[list[Row]]) -> DataLoader[PositionBatch]:
    # A loader draws a number for its workers; its own generator keeps this from the global one.
    return DataLoader(batches, batch_size=None, sampler=sampler, generator=torch.Generator())
