"""The order of cases, which depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch.utils.data import Sampler

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
