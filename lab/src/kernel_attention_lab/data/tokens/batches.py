"""Batches of token sequences of similar length, counted in steps instead of epochs.

Legend: B cases of a batch, P sequences of a case (2 for pairs), N tokens of the longest, n cases.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from kernel_attention.series import Batch
from kernel_attention_lab.data.step_sampler import StepSampler
from kernel_attention_lab.data.tokens.sets import TokenSplit

_POOL = 50
"""The number of batches that are sorted by length together: padding is short, and lengths still mix."""


def batch_order(lengths: np.ndarray, batch_size: int, seed: int, epoch: int) -> list[np.ndarray]:
    """The batches of an epoch as arrays of case numbers, a function of (seed, epoch) alone.

    Cases are shuffled, sorted by length within pools of 50 batches, cut into batches, and the batches
    shuffled. Cases that do not fill the last batch are left out of this epoch, unless there is no other.

    Args:
        lengths: tokens of every case, (n,).
        batch_size: B.
        seed: of the run.
        epoch: from 0.
    """
    generator = np.random.default_rng([seed, epoch])
    order = generator.permutation(len(lengths))
    full = max(len(order) // batch_size, 1) * batch_size
    order, pool = order[:full], _POOL * batch_size
    pools = [order[start : start + pool] for start in range(0, len(order), pool)]
    by_length = np.concatenate([cases[np.argsort(lengths[cases], kind="stable")] for cases in pools])
    batches = [by_length[start : start + batch_size] for start in range(0, len(by_length), batch_size)]
    return [batches[place] for place in generator.permutation(len(batches))]


class LengthSampler(StepSampler[int]):
    """Rounds of cases of similar length, each epoch in the order of ``batch_order``."""

    def __init__(self, lengths: np.ndarray, batch_size: int, steps: int, seed: int = 0) -> None:
        super().__init__(batch_size, steps)
        self.lengths, self.seed = lengths, seed
        self.per_epoch = max(len(lengths) // batch_size, 1)

    def batches(self, epoch: int) -> list[list[int]]:
        """Numbers of the cases in every batch of an epoch, by ``batch_order``."""
        return [batch.tolist() for batch in batch_order(self.lengths, self.batch_size, self.seed, epoch)]


class _Batches(Dataset[Batch]):
    def __init__(self, split: TokenSplit) -> None:
        self.split = split

    def __getitem__(self, cases: list[int]) -> Batch:
        return padded_batch(self.split, cases)


def padded_batch(split: TokenSplit, cases: list[int]) -> Batch:
    """Cases padded with token 0 on the right: x and mask (B, N), or (B, 2, N) for pairs."""
    sequences = [sequence for case in cases for sequence in split.case(case)]
    longest = max(len(sequence) for sequence in sequences)
    x = np.zeros((len(sequences), longest), dtype=np.int64)
    mask = np.zeros(x.shape, dtype=bool)
    for row, sequence in enumerate(sequences):
        x[row, : len(sequence)] = sequence
        mask[row, : len(sequence)] = True
    shape = (len(cases), longest) if split.parts == 1 else (len(cases), split.parts, longest)
    targets = torch.from_numpy(split.targets[cases])
    return Batch(torch.from_numpy(x).view(shape), torch.from_numpy(mask).view(shape), targets)


def make_step_loader(split: TokenSplit, batch_size: int, steps: int, seed: int) -> DataLoader:
    """Training batches of ``steps`` steps a pass; see ``LengthSampler``."""
    sampler = LengthSampler(split.lengths, batch_size, steps, seed)
    # Without a generator of its own, every pass would draw a worker seed from the global one.
    generator = torch.Generator().manual_seed(seed)
    return DataLoader(_Batches(split), batch_size=None, sampler=sampler, generator=generator)


def make_length_loader(split: TokenSplit, batch_size: int) -> DataLoader:
    """Every case once, sorted by length; ``length_order`` gives the order of the results."""
    order = length_order(split)
    batches = [order[start : start + batch_size].tolist() for start in range(0, len(order), batch_size)]
    return DataLoader(
        _Batches(split), batch_size=None, sampler=batches, generator=torch.Generator().manual_seed(0)
    )


def length_order(split: TokenSplit) -> np.ndarray:
    """Case numbers in the order of ``make_length_loader``, (n,)."""
    return np.argsort(split.lengths, kind="stable")
