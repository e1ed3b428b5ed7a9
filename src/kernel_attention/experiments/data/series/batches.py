"""Batches of padded sequences, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.epoch_sampler import EpochSampler
from kernel_attention.experiments.data.series.time_series import SequenceSplit


class Batch(NamedTuple):
    """Padded sequences. A named tuple, so Lightning moves it between devices.

    x: (B, N, c) float32, zero to the right of each sequence.
    attention_mask: (B, N) bool, True = real step.
    target: (B,) int64 or float32; None for unlabelled sequences.
    """

    x: Tensor
    attention_mask: Tensor
    target: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """What the model is called with."""
        return self.x, self.attention_mask


class _Cases(Dataset[tuple[Tensor, Tensor | None]]):
    def __init__(self, sequences: Sequence[np.ndarray], targets: np.ndarray | None) -> None:
        # A tensor cannot use read-only memory, as joblib maps large arrays; only such memory is copied.
        self.sequences = [
            torch.from_numpy(np.require(sequence, np.float32, ["C", "W"])) for sequence in sequences
        ]
        self.targets = (
            None if targets is None else torch.from_numpy(np.require(targets, requirements=["C", "W"]))
        )

    def __len__(self) -> int:
        return len(self.sequences)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor | None]:
        return self.sequences[index], None if self.targets is None else self.targets[index]


def collate(cases: Sequence[tuple[Tensor, Tensor | None]]) -> Batch:
    """Pad cases (n_i, c) on the right with zeros to the longest of them."""
    lengths = torch.tensor([len(sequence) for sequence, _ in cases])
    x = torch.nn.utils.rnn.pad_sequence([sequence for sequence, _ in cases], batch_first=True)
    mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
    targets = [target for _, target in cases if target is not None]
    return Batch(x, mask, torch.stack(targets) if targets else None)


def make_loader(
    split: SequenceSplit | Sequence[np.ndarray],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
) -> DataLoader:
    """A DataLoader of `Batch`, each padded to its own longest sequence.

    split: labelled cases, or a plain list of sequences (n_i, c), whose batches have target None.
    shuffle: draw the order from an `EpochSampler(len(split), seed)`, reachable as `loader.sampler`.

    Raises InputError for an empty split, a batch_size below 1, or drop_last that would drop every case.
    """
    if not isinstance(batch_size, (int, np.integer)) or batch_size < 1:
        raise InputError(f"batch_size {batch_size!r} must be an integer of at least 1")
    if num_workers < 0:
        raise InputError(f"num_workers {num_workers!r} must be at least 0")
    if not len(split):
        raise InputError("split is empty: there are no sequences to make batches of")
    if drop_last and len(split) < batch_size:
        raise InputError(f"drop_last with batch_size {batch_size} leaves no batch of {len(split)} cases")
    if isinstance(split, SequenceSplit):
        cases = _Cases(split.sequences, split.targets)
    else:
        cases = _Cases(split, None)
    return DataLoader(
        cases,
        batch_size=int(batch_size),
        sampler=EpochSampler(len(cases), seed) if shuffle else SequentialSampler(cases),
        num_workers=num_workers,
        drop_last=drop_last,
        collate_fn=collate,
        # Without this generator, every pass would draw a worker seed from the global one.
        generator=torch.Generator().manual_seed(int(seed)),
    )
