"""The order of cases, which depends on (seed, epoch) alone, and a process's part of a batch.

All processes draw the same batches, of the sequences of a whole step. Each is cut into parts whose sizes
differ by at most one. So a run on several devices sees the batches of one device with the larger batch,
whatever the order of the cases depends on.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from kernel_attention.errors import InputError


class EpochSampler(Sampler[int]):
    """A permutation of `length` cases drawn from a generator of its own, seeded by (seed, epoch).

    A run resumed at epoch e sees the same order as an uninterrupted run, and no global generator is read or
    advanced. The trainer calls `set_epoch` at the start of every epoch; a plain loop must do so itself.
    """

    def __init__(self, length: int, seed: int = 0) -> None:
        if length < 1:
            raise InputError(f"length {length!r} of a sampler must be at least 1")
        if not isinstance(seed, (int, np.integer)) or seed < 0:
            raise InputError(f"seed {seed!r} must be an integer of at least 0")
        self.length = length
        self.seed = int(seed)
        self.epoch = 0
        self._skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Select the permutation of this epoch for the next pass."""
        self.epoch = int(epoch)

    def skip(self, batches: int, batch_size: int) -> None:
        """Skip the first batches of the next pass, for a run that stopped after them."""
        self._skipped = batches * batch_size

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        # A hash of the pair: seed + epoch would give seed 1 in epoch 0 the order of seed 0 in epoch 1.
        state = np.random.SeedSequence([self.seed, self.epoch]).generate_state(1, np.uint64)[0]
        generator = torch.Generator().manual_seed(int(state) & (2**63 - 1))
        start, self._skipped = self._skipped, 0
        yield from torch.randperm(self.length, generator=generator)[start:].tolist()


class Share(NamedTuple):
    """A part of a batch, as the loader makes it of the part's cases.

    ``counts`` is False where the batch had fewer cases than parts. Its first case then stands in for the
    part, so that the process stays in step with the others.
    """

    batch: Any
    counts: bool = True


class _Cases(NamedTuple):
    cases: list[Any]
    counts: bool


class _ShareSampler(Sampler[_Cases]):
    def __init__(self, loader: DataLoader, share: int, shares: int, passes: int) -> None:
        self.batches: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self.share, self.shares, self.passes = share, shares, passes

    def __len__(self) -> int:
        return len(self.batches) * self.passes

    def __iter__(self) -> Iterator[_Cases]:
        parts = self.shares * self.passes
        for batch in self.batches:
            for part in range(self.share * self.passes, (self.share + 1) * self.passes):
                own = batch[len(batch) * part // parts : len(batch) * (part + 1) // parts]
                yield _Cases(own or batch[:1], bool(own))


class _Shares(Dataset[Share]):
    def __init__(self, loader: DataLoader) -> None:
        self.cases: Any = loader.dataset
        self.collate = loader.collate_fn
        self.makes_batches = loader.batch_sampler is None  # of a list of cases

    def __getitem__(self, part: _Cases) -> Share:
        if self.makes_batches:
            return Share(self.cases[part.cases], part.counts)
        fetch = getattr(self.cases, "__getitems__", None)
        cases = [self.cases[case] for case in part.cases] if fetch is None else fetch(part.cases)
        return Share(self.collate(cases), part.counts)


def shared_loader(loader: DataLoader, share: int, shares: int, passes: int = 1) -> DataLoader[Share]:
    """A loader of ``passes`` parts of each batch, those of process ``share`` of ``shares``, in its sampler's
    order.

    The sampler of ``loader``, or its batch sampler, gives a list of cases for each batch.
    """
    return DataLoader(
        _Shares(loader),
        batch_size=None,
        sampler=_ShareSampler(loader, share, shares, passes),
        num_workers=loader.num_workers,
        persistent_workers=loader.persistent_workers,
        generator=loader.generator,
    )
