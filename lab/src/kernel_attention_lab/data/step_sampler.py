"""Batches counted in steps instead of epochs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch.utils.data import Sampler

from kernel_attention.errors import InputError

Case = TypeVar("Case")


class StepSampler(Sampler[list[Case]], Generic[Case]):
    """The batches of one round from an endless sequence of epochs, for training counted in steps.

    Round r has the batches r * steps to (r + 1) * steps - 1. The trainer calls ``set_epoch`` with the number
    of the round, so a run resumed in the middle of an epoch sees the same batches as an uninterrupted run.

    Args:
        batch_size: B.
        steps: batches of a round.
    """

    per_epoch: int  # batches of an epoch; set by the subclass

    def __init__(self, batch_size: int, steps: int) -> None:
        if batch_size < 1 or steps < 1:
            raise InputError(f"batch_size={batch_size} and steps={steps} must be at least 1")
        self.batch_size = batch_size
        self.steps = steps
        self.round = 0
        self._skipped = 0

    @abstractmethod
    def batches(self, epoch: int) -> list[list[Case]]:
        """The cases of every batch of an epoch, a function of the seed and the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """Select the round of the next pass."""
        self.round = int(epoch)

    def skip(self, batches: int, batch_size: int = 1) -> None:
        """Skip the first batches of the next pass, for a run that stopped after them."""
        self._skipped = batches

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[Case]]:
        drawn: int = -1
        batches: list[list[Case]] = []
        start, self._skipped = self._skipped, 0
        for number in range(self.round * self.steps + start, (self.round + 1) * self.steps):
            epoch, place = divmod(number, self.per_epoch)
            if epoch != drawn:
                drawn, batches = epoch, self.batches(epoch)
            yield batches[place]
