"""A split of sequences, its held-out part and its scale, and batches in an order that depends on (seed,
epoch) alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import DTypeLike
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from kernel_attention.errors import InputError, unknown
from kernel_attention.models.sequence import is_resolved
from kernel_attention.training.samplers import EpochSampler

TASKS = ("classification", "regression")

_ROUNDINGS = 1024  # of float64 that the arithmetic before may have left in a channel that never changes


@dataclass(frozen=True, eq=False)
class SequenceSplit:
    """Cases and their targets.

    sequences: one array (n_i, c) a case, time first; lengths may differ. float32, or float64 where float32
        would round a channel's signal away.
    targets: (cases,) int64 class indices, or float32 values in regression, (cases,) or (cases, values).
    weights: (cases,) float32, how much each case counts in losses and accuracies; None: all the same.
    """

    sequences: list[np.ndarray]
    targets: np.ndarray
    weights: np.ndarray | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and len(self.weights) != len(self.targets):
            raise InputError(f"a split has {len(self.targets)} targets but {len(self.weights)} weights")
        if len(self.sequences) != len(self.targets):
            raise InputError(f"a split has {len(self.sequences)} sequences but {len(self.targets)} targets")

    def __len__(self) -> int:
        return len(self.sequences)

    def in_precision(self, dtype: DTypeLike) -> SequenceSplit:
        """The same cases in another precision."""
        return replace(self, sequences=in_precision(self.sequences, dtype))

    def subset(self, indices: Sequence[int] | np.ndarray) -> SequenceSplit:
        """The cases at `indices`, in that order; the arrays are shared, not copied."""
        chosen = np.asarray(indices, np.int64)
        weights = None if self.weights is None else self.weights[chosen]
        return SequenceSplit([self.sequences[i] for i in chosen.tolist()], self.targets[chosen], weights)

    def joined(self, other: SequenceSplit) -> SequenceSplit:
        """The cases of both splits, this one's first; the arrays of the sequences are shared."""
        targets = np.concatenate([self.targets, other.targets])
        weights = None
        if self.weights is not None or other.weights is not None:
            parts = [np.ones(len(s), np.float32) if s.weights is None else s.weights for s in (self, other)]
            weights = np.concatenate(parts)
        return SequenceSplit([*self.sequences, *other.sequences], targets, weights)

    def balanced(self) -> SequenceSplit:
        """The same cases, weighted so that all classes count the same and the mean of the weights is 1."""
        _, inverse, counts = np.unique(self.targets, return_inverse=True, return_counts=True)
        weights = (len(self) / (len(counts) * counts[inverse])).astype(np.float32)
        return SequenceSplit(self.sequences, self.targets, weights)


class Standardizer:
    """Shift and scale per channel: (x - mean) / std over all time steps of the sequences it was fitted on.

    mean, std: (c,) float64; a channel that never changes keeps std 1, so it becomes zero instead of noise.
    dtype: float32, or float64 where a channel lies so far from zero that float32 would round its signal away
        before it is centred.
    """

    def __init__(self, mean: Sequence[float] | np.ndarray, std: Sequence[float] | np.ndarray) -> None:
        self.mean = np.asarray(mean, dtype=np.float64)
        self.std = np.asarray(std, dtype=np.float64)
        if self.mean.ndim != 1 or self.mean.shape != self.std.shape:
            raise InputError(
                f"mean and std need one shape (channels,), got {self.mean.shape} and {self.std.shape}"
            )
        if not (np.isfinite(self.mean).all() and np.isfinite(self.std).all() and (self.std > 0).all()):
            raise InputError("mean and std must be finite and std positive")

    @property
    def dtype(self) -> type[np.floating]:
        """The precision in which sequences resolve their deviations."""
        return np.float32 if np.all(is_resolved(self.mean, self.std)) else np.float64

    @classmethod
    def fit(cls, sequences: Sequence[np.ndarray]) -> Standardizer:
        """Statistics of the training sequences, each (n_i, c). Every time step has equal weight."""
        if not len(sequences):
            raise InputError("sequences is empty: there is nothing to fit a standardizer on")
        # Case by case in float64: one array of all steps would double the memory of a set like PEMS-SF.
        steps = sum(len(sequence) for sequence in sequences)
        # From the first step on, so that the sums keep the digits of a signal far from zero.
        origin = sequences[0][0].astype(np.float64)
        mean = origin + sum((sequence - origin).sum(axis=0) for sequence in sequences) / steps
        std = np.sqrt(sum(((sequence - mean) ** 2).sum(axis=0) for sequence in sequences) / steps)
        # A spread below the resolution of the sequences at this mean is rounding, not signal.
        is_exact = all(sequence.dtype == np.float64 for sequence in sequences)
        rounding = _ROUNDINGS * np.finfo(np.float64).eps if is_exact else np.finfo(np.float32).eps
        constant = std <= rounding * np.abs(mean)
        return cls(mean, np.where(constant, 1.0, std))

    def transform(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Standardised float32 copies of `sequences`, each (n_i, c)."""
        for case, sequence in enumerate(sequences):
            if sequence.shape[1] != len(self.mean):
                raise InputError(
                    f"case {case} has {sequence.shape[1]} channels, "
                    f"the standardizer was fitted on {len(self.mean)}"
                )
        return [((sequence - self.mean) / self.std).astype(np.float32) for sequence in sequences]


def in_precision(sequences: Sequence[np.ndarray], dtype: DTypeLike) -> list[np.ndarray]:
    """Sequences in this precision; those that have it are shared, not copied."""
    return [sequence.astype(dtype, copy=False) for sequence in sequences]


def stratified_split(
    split: SequenceSplit, fraction: float, seed: int, task: str = "classification"
) -> tuple[SequenceSplit, SequenceSplit]:
    """Divide a split into (rest, held_out), the same way for the same seed; cases keep their order.

    About `fraction` of the cases are held out. Classification keeps the class proportions, and every class of
    two or more cases has at least one on each side (a class of one stays in the rest). Regression draws one
    case from each of equally filled ranges of the target, or of the mean of several targets.

    Raises InputError where `fraction` is outside (0, 1), `task` is unknown or a part would be empty.
    """
    if not 0 < fraction < 1:
        raise InputError(f"fraction {fraction!r} must lie between 0 and 1, both excluded")
    if task not in TASKS:
        raise unknown("task", task, TASKS)
    if not isinstance(seed, (int, np.integer)) or seed < 0:
        raise InputError(f"seed {seed!r} must be an integer of at least 0")
    generator = np.random.default_rng(seed)
    groups = (
        _class_groups(split.targets, fraction)
        if task == "classification"
        else _ranges(split.targets, fraction)
    )
    held_out = sorted(int(i) for cases, count in groups for i in generator.permutation(cases)[:count])
    if not held_out:
        raise InputError(
            f"cannot hold out {fraction} of {len(split)} cases: "
            + ("no class has two cases" if task == "classification" else "at least two cases are needed")
        )
    rest = np.setdiff1d(np.arange(len(split)), held_out)
    return split.subset(rest), split.subset(held_out)


def _class_groups(targets: np.ndarray, fraction: float) -> list[tuple[np.ndarray, int]]:
    """The cases of each class and how many to hold out: floors, then one more to the largest remainders."""
    groups = [np.flatnonzero(targets == label) for label in np.unique(targets)]
    sizes = np.array([len(cases) for cases in groups])
    quotas = fraction * sizes
    lowest = np.minimum(sizes - 1, 1)
    counts = np.clip(np.floor(quotas).astype(int), lowest, sizes - 1)
    wanted = round(fraction * len(targets))
    for group in np.argsort(counts - quotas, kind="stable"):
        if counts.sum() < wanted and counts[group] < sizes[group] - 1 and counts[group] < quotas[group]:
            counts[group] += 1
    return [(cases, int(count)) for cases, count in zip(groups, counts, strict=True)]


def _ranges(targets: np.ndarray, fraction: float) -> list[tuple[np.ndarray, int]]:
    if len(targets) < 2:
        return []
    count = min(max(round(fraction * len(targets)), 1), len(targets) - 1)
    values = targets if targets.ndim == 1 else targets.mean(axis=1)
    return [(cases, 1) for cases in np.array_split(np.argsort(values, kind="stable"), count)]


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
