"""Batches of padded sequences, in an order that depends on (seed, epoch) alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from kernel_attention.errors import InputError
from kernel_attention.series.splits import SequenceSplit
from kernel_attention.training.samplers import EpochSampler


class Batch(NamedTuple):
    """Padded sequences. A named tuple, so that it moves between devices as a whole.

    x: (B, N, c), zero to the right of each sequence; float32, or float64 where the sequences are.
    attention_mask: (B, N) bool, True = real step.
    target: (B,) int64 or float32; None for unlabelled sequences.
    weight: (B,) float32, how much each counts; None: all the same.
    """

    x: Tensor
    attention_mask: Tensor
    target: Tensor | None = None
    weight: Tensor | None = None

    @property
    def arguments(self) -> tuple[Tensor, Tensor]:
        """The arguments of the model's call."""
        return self.x, self.attention_mask


_Case = tuple[Tensor, Tensor | None, Tensor | None]


class _Cases(Dataset[_Case]):
    def __init__(
        self,
        sequences: Sequence[np.ndarray],
        targets: np.ndarray | None = None,
        weights: np.ndarray | None = None,
        others: Sequence[Sequence[np.ndarray]] = (),
    ) -> None:
        # A tensor cannot use read-only memory, as joblib maps large arrays; only such memory is copied.
        self.versions = [
            [torch.from_numpy(np.require(sequence, _kept(sequence), ["C", "W"])) for sequence in version]
            for version in (sequences, *others)
        ]
        self.targets, self.weights = (
            None if values is None else torch.from_numpy(np.require(values, requirements=["C", "W"]))
            for values in (targets, weights)
        )

    def __len__(self) -> int:
        return len(self.versions[0])

    def __getitem__(self, index: int) -> _Case:
        target, weight = (
            None if values is None else values[index] for values in (self.targets, self.weights)
        )
        version = int(torch.randint(len(self.versions), ())) if len(self.versions) > 1 else 0
        return self.versions[version][index], target, weight


def _kept(sequence: np.ndarray) -> type[np.floating]:
    """The precision in which a loader keeps a sequence; of float16, the batches are float32."""
    return sequence.dtype.type if sequence.dtype in (np.float16, np.float64) else np.float32


def collate(cases: Sequence[_Case]) -> Batch:
    """Pad cases (n_i, c) on the right with zeros to the longest of them."""
    sequences, targets, weights = zip(*cases, strict=True)
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    x = torch.nn.utils.rnn.pad_sequence(list(sequences), batch_first=True)
    x = x if x.dtype == torch.float64 else x.float()
    mask = torch.arange(x.shape[1])[None, :] < lengths[:, None]
    target, weight = (None if values[0] is None else torch.stack(values) for values in (targets, weights))
    return Batch(x, mask, target, weight)


def make_loader(
    split: SequenceSplit | Sequence[np.ndarray],
    batch_size: int,
    *,
    shuffle: bool = False,
    seed: int = 0,
    num_workers: int = 0,
    drop_last: bool = False,
    others: Sequence[Sequence[np.ndarray]] = (),
) -> DataLoader:
    """A DataLoader of `Batch`, each padded to its own longest sequence.

    split: labelled cases, or a plain list of sequences (n_i, c), whose batches have target None.
    shuffle: draw the order from an `EpochSampler(len(split), seed)`, reachable as `loader.sampler`.
    others: other versions of all sequences. A batch takes any version of each case, by the global generator.

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
        cases = _Cases(split.sequences, split.targets, split.weights, others)
    else:
        cases = _Cases(split, others=others)
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
