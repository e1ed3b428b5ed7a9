"""Batches of packed contexts; the recipe gives their number per round.

Legend: B contexts of a batch, L tokens of a context.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from kernel_attention.training.samplers import EpochSampler
from kernel_attention_lab.data.step_sampler import StepSampler
from kernel_attention_lab.data.texts.text import pack_contexts


class TextBatch(NamedTuple):
    """inputs (B, L) int64; targets (B, L) int64, the tokens after them, or ``IGNORED``."""

    inputs: Tensor
    targets: Tensor


class ContextSampler(StepSampler[int]):
    """Rounds of contexts; (seed, epoch) gives the order of each epoch.

    The sampler reads only its own generator. The last batch of an epoch may be smaller.

    Args:
        length: cases.
        batch_size: B.
        steps: batches of a round.
        seed: of the orders.
    """

    def __init__(self, length: int, batch_size: int, steps: int, seed: int = 0) -> None:
        super().__init__(batch_size, steps)
        self.order = EpochSampler(length, seed)
        self.per_epoch = -(-length // batch_size)

    def batches(self, epoch: int) -> list[list[int]]:
        """Numbers of the contexts in every batch of an epoch, shuffled."""
        self.order.set_epoch(epoch)
        return _in_batches(list(self.order), self.batch_size)


class _Contexts(Dataset[TextBatch]):
    """Contexts, indexed by the numbers of a whole batch."""

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        self.inputs, self.targets = map(torch.from_numpy, pack_contexts(tokens, length))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, numbers: list[int]) -> TextBatch:
        return TextBatch(self.inputs[numbers], self.targets[numbers])


def training_contexts(
    tokens: np.ndarray, length: int, batch_size: int, steps: int, seed: int = 0
) -> DataLoader[TextBatch]:
    """Rounds of ``steps`` shuffled batches of the packed contexts of a text; see ``ContextSampler``."""
    contexts = _Contexts(tokens, length)
    sampler = ContextSampler(len(contexts), batch_size, steps, seed)
    return _loader(contexts, sampler)


def ordered_contexts(tokens: np.ndarray, length: int, batch_size: int) -> DataLoader[TextBatch]:
    """All packed contexts of a text in their order."""
    contexts = _Contexts(tokens, length)
    return _loader(contexts, _in_batches(list(range(len(contexts))), batch_size))


def _in_batches(numbers: list[int], batch_size: int) -> list[list[int]]:
    return [numbers[start : start + batch_size] for start in range(0, len(numbers), batch_size)]


def _loader(contexts: _Contexts, batches: Iterable[list[int]]) -> DataLoader[TextBatch]:
    # A loader draws a number for its workers; its own generator keeps this from the global one.
    return DataLoader(contexts, batch_size=None, sampler=batches, generator=torch.Generator())
