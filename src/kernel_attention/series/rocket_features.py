"""Rocket stems in training: their thresholds, and their features computed once instead of at every step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.limits import Deadline, now
from kernel_attention.models import SequenceClassifier
from kernel_attention.models.rocket_stem import RocketStem, cases_at_once
from kernel_attention.models.sequence import SequenceEncoder
from kernel_attention.series.augmentation import augment_unscaled
from kernel_attention.series.splits import SequenceSplit, Standardizer, make_loader
from kernel_attention.tensors.pooling import pool_mask

FITTED_CASES = 64
"""That give thresholds and the scale of the features."""
_FITTED_STEPS = 2**18  # of longer series, fewer cases have so many
_FEWEST_FITTED = 8
_KEPT_BYTES = 128 * 2**20  # of the features of augmented copies
_MOST_COPIES = 7
_MOST_BYTES = 2**30  # of all features; beyond, every step computes its own


def fit_input(
    encoder: SequenceEncoder, sequences: Sequence[np.ndarray], fitted_cases: int = FITTED_CASES
) -> None:
    """Set the scale of the training sequences, (n_i, c) each, and the thresholds of a rocket stem.

    The thresholds are those of ``fitted_cases`` of the sequences, evenly spaced.
    """
    scale = Standardizer.fit(sequences)
    encoder.set_scale(torch.from_numpy(scale.mean), torch.from_numpy(scale.std))
    if isinstance(encoder.project, RocketStem):
        fitted_cases = min(
            len(sequences), fitted_cases, max(_FITTED_STEPS // max(map(len, sequences)), _FEWEST_FITTED)
        )
        places = np.linspace(0, len(sequences) - 1, fitted_cases).round().astype(int)
        (batch,) = make_loader([sequences[place] for place in places], len(places))
        encoder.fit_stem(*batch.arguments)


class OnFeatures(nn.Module):
    """A classifier with a rocket stem that is called with the features of the stem.

    Args:
        model: the classifier, whose parameters this module shares.
    """

    def __init__(self, model: SequenceClassifier) -> None:
        super().__init__()
        self.model = model

    @property
    def encoder(self) -> SequenceEncoder:
        """The encoder of the classifier."""
        return self.model.encoder

    def forward(self, features: Tensor, token_mask: Tensor | None = None) -> Tensor:
        """(B, M, F), (B, M) -> (B, num_outputs)."""
        return self.model.from_features(features, token_mask)


class Features(NamedTuple):
    """The features of training sequences, (M_i, F) float16 each, and those of augmented copies of them."""

    split: SequenceSplit
    copies: list[list[np.ndarray]]


def training_features(
    model: SequenceClassifier,
    split: SequenceSplit,
    augmentation: Sequence[str],
    deadline: Deadline | None = None,
) -> Features:
    """Training data of ``OnFeatures``: the features of a split, and of up to seven augmented copies.

    There are fewer copies where features are large: many cases need less augmentation. No copy begins that
    would take what is left until the deadline, if the last one is a measure.
    """
    deadline = deadline or Deadline()
    started = now()
    plain = split_features(model, split)
    size = sum(part.nbytes for part in plain.sequences)
    count = min(_KEPT_BYTES // size - 1, _MOST_COPIES) if augmentation else 0
    copies: list[list[np.ndarray]] = []
    while len(copies) < count and deadline.fits(now() - started):
        started = now()
        copies.append(list(series_features(model, split.sequences, augmentation)))
    return Features(plain, copies)


def split_features(model: SequenceClassifier, split: SequenceSplit) -> SequenceSplit:
    """The cases of a split as the features of their series."""
    return SequenceSplit(list(series_features(model, split.sequences)), split.targets, split.weights)


def can_keep_features(model: SequenceClassifier, mixup: float, split: SequenceSplit) -> bool:
    """True where features of all cases are there and need no more than 1 GiB."""
    project = model.encoder.project
    if not isinstance(project, RocketStem) or mixup:
        return False
    tokens = sum(-(-len(sequence) // project.patch_len) for sequence in split.sequences)
    return 2 * tokens * project.num_features <= _MOST_BYTES


def series_features(
    model: SequenceClassifier, sequences: Sequence[np.ndarray], augmentation: Sequence[str] = ()
) -> Iterator[np.ndarray]:
    """The features of every series, (M_i, F) float16, a batch at a time."""
    encoder = model.encoder
    for x, mask, *_ in make_loader(sequences, cases_at_once(max(map(len, sequences)))):
        if augmentation:
            x = augment_unscaled(x, mask, augmentation, *encoder.scale_in(x.dtype))
        with torch.no_grad():
            features = encoder.features(x, mask)
        tokens = pool_mask(mask, encoder.patch_len).sum(dim=1)
        # They are fractions over few deviations: half precision keeps three digits in half the memory.
        for part, count in zip(features, tokens, strict=True):
            yield part[:count].half().numpy()
