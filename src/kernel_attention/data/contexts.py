"""Batches of packed contexts, as many to a round as the recipe says.

Legend: B contexts of a batch, L tokens of a context.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from kernel_attention.data.batches import EpochSampler
from kernel_attention.data.text import pack_contexts
from kernel_attention.errors import InputError


class TextBatch(NamedTuple):
    """inputs (B, L) int64; targets (B, L) int64, the tokens after them, or ``IGNORED``."""

    inputs: Tensor
    targets: Tensor


class StepSampler(Sampler[list[int]]):
    """The batches of one round out of an endless row of epochs, each in an order drawn by (seed, epoch).

    Round r has the batches r * steps to (r + 1) * steps - 1 of that row, so a run resumed at a round's end
    goes on in the middle of the epoch, and no generator but its own is read. The last batch of an epoch may
    be smaller.

    Args:
        length: cases.
        batch_size: B.
        steps: batches of a round.
        seed: of the orders.
    """

    def __init__(self, length: int, batch_size: int, steps: int, seed: int = 0) -> None:
        if batch_size < 1 or steps < 1:
            raise InputError(f"batch_size={batch_size} and steps={steps} must be at least 1")
        self.order = EpochSampler(length, seed)
        self.batch_size = batch_size
        self.steps = steps
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the round (Lightning's epoch) of the next pass."""
        self.epoch = int(epoch)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        batches = -(-len(self.order) // self.batch_size)
        permutation: list[int] = []
        drawn = -1
        for number in range(self.epoch * self.steps, (self.epoch + 1) * self.steps):
            epoch, place = divmod(number, batches)
            if epoch != drawn:
                self.order.set_epoch(epoch)
                permutation, drawn = list(self.order), epoch
            yield permutation[place * self.batch_size : (place + 1) * self.batch_size]


class _Contexts(Dataset[TextBatch]):
    """Indexed by the numbers of a whole batch."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.inputs, self.targets = map(torch.from_numpy, pack_contexts(tokens, length))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, numbers: list[int]) -> TextBatch:
        return TextBatch(self.inputs[numbers], self.targets[numbers])


def training_contexts(
    tokens: np.ndarray, length: int, batch_size: int, steps: int, seed: int = 0
) -> DataLoader[TextBatch]:
    """Rounds of ``steps`` shuffled batches of the packed contexts of a text; see :class:`StepSampler`."""
    contexts = _Contexts(tokens, length)
    sampler = StepSampler(len(contexts), batch_size, steps, seed)
    return _loader(contexts, sampler)


def ordered_contexts(tokens: np.ndarray, length: int, batch_size: int) -> DataLoader[TextBatch]:
    """All packed contexts of a text in their order."""
    contexts = _Contexts(tokens, length)
    numbers = list(range(len(contexts)))
    batches = [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]
    return _loader(contexts, batches)


def _loader(contexts: _Contexts, batches: Iterable[list[int]]) -> DataLoader[TextBatch]:
    # A loader draws a number for its workers; from a generator of its own, so that nothing else notices.
    return DataLoader(contexts, batch_size=None, sampler=batches, generator=torch.Generator())
