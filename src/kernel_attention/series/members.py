"""One trained model of an estimator, and the sizes of training that follow from the size of the data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.limits import Deadline, now, require_memory
from kernel_attention.models import SequenceClassifier
from kernel_attention.series.closed_form import fit_readout
from kernel_attention.series.outputs import predict_outputs
from kernel_attention.series.rocket_features import (
    FITTED_CASES,
    OnFeatures,
    can_keep_features,
    fit_input,
    series_features,
    split_features,
    training_features,
)
from kernel_attention.series.settings import MemberSettings
from kernel_attention.series.splits import SequenceSplit, make_loader
from kernel_attention.series.task import TimeSeriesTask
from kernel_attention.training.course import MemoryRecorder
from kernel_attention.training.loop import fit
from kernel_attention.training.modes import plain_modes, private_generators
from kernel_attention.training.processes import training_device

_BATCH_SIZES = (8, 64)
_STEPS = (1000, 1500)
_TOKENS = 1_500_000  # that a model reads in training: a minute or two of one processor core
_FEWEST_EPOCHS = 20
_COPIES_PART = 0.4  # of the time that is left, for augmented copies of the features
_SHORTEST = 1e-3  # seconds of training


def automatic_batch_size(cases: int) -> int:
    """A sixteenth of the training cases, as a power of two from 8 to 64."""
    smallest, largest = _BATCH_SIZES
    return min(max(2 ** round(math.log2(max(cases / 16, 1))), smallest), largest)


def automatic_steps(batch_size: int, num_tokens: int) -> int:
    """Steps that read about 1.5 million tokens in batches of series of ``num_tokens``; from 1000 to 1500."""
    fewest, most = _STEPS
    return min(max(round(_TOKENS / (batch_size * num_tokens)), fewest), most)


def automatic_epochs(cases: int, batch_size: int, steps: int, fewest: int = _FEWEST_EPOCHS) -> int:
    """Passes over the training cases that make about ``steps`` steps, and at least ``fewest`` of them."""
    return max(round(steps / math.ceil(cases / batch_size)), fewest)


class Member(NamedTuple):
    """A trained model, on the CPU, its options, the figures of every epoch and the epoch that was kept."""

    model: SequenceClassifier
    options: dict[str, Any]
    rows: list[dict[str, float]]
    best_epoch: int


def train_member(
    settings: MemberSettings,
    split: SequenceSplit,
    held_out: SequenceSplit | None,
    num_outputs: int,
    max_len: int,
    *,
    is_regression: bool = False,
    deadline: Deadline | None = None,
    fitted_cases: int = FITTED_CASES,
    progress: bool = False,
    start: Mapping[str, Tensor] | None = None,
    watch: Callable[[list[dict[str, Any]]], bool] | None = None,
) -> Member:
    """Train a model of these settings on a split.

    The last epoch is kept, or, with held-out cases, the best on these. The caller's random generators do not
    change.

    Args:
        settings: the model and its training.
        split: the cases that train.
        held_out: the cases that choose the epoch; None: the last epoch stays.
        num_outputs: classes, or values.
        max_len: longest sequence that the model takes.
        is_regression: whether the outputs are values.
        deadline: training ends with the step that passes it; one step is always made.
        fitted_cases: that set the thresholds of a rocket stem.
        progress: show a progress bar.
        start: weights and scale of the model before training; None: drawn anew, and the scale of the split.
        watch: called after every epoch with the figures of all epochs so far; True ends training.

    Raises:
        InputError: for a ``start`` that is that of another model.
    """
    require_memory(f"max_len={max_len}", 4 * max_len * settings.embed_dim, "lower max_len")
    require_memory(
        f"patch_len={settings.patch_len}", 4 * settings.patch_len * settings.embed_dim, "lower patch_len"
    )
    seed = settings.seed
    variance = (
        float(np.var(held_out.targets, axis=0).mean()) if held_out is not None and is_regression else None
    )
    recorder = MemoryRecorder(variance, settings.patience, watch)
    options = settings.encoder_options()
    with plain_modes(), private_generators(seed, training_device(settings.accelerator)):
        model = SequenceClassifier(split.sequences[0].shape[1], num_outputs, max_len, **options)
        _start(model, split, start, fitted_cases)
        trained: SequenceClassifier | OnFeatures = model
        copies: list[list[np.ndarray]] = []
        features: Iterable[np.ndarray] = series_features(model, split.sequences)  # computed as they are read
        if can_keep_features(model, settings.mixup, split):
            split, copies = training_features(
                model, split, settings.augmentation, deadline and deadline.part(_COPIES_PART)
            )
            held_out = None if held_out is None else split_features(model, held_out)
            settings = replace(settings, augmentation=[])
            trained, features = OnFeatures(model), split.sequences
        if settings.readout:
            fit_readout(model, features, split, is_regression)
        max_seconds = max(deadline.left(), _SHORTEST) if deadline is not None and deadline.is_set else 0.0
        task = TimeSeriesTask(trained, settings.train_settings(), settings, is_regression, max_seconds)
        fit(
            task,
            make_loader(split, settings.batch_size, shuffle=True, seed=seed, others=copies),
            None if held_out is None else make_loader(held_out, settings.batch_size),
            observers=[recorder],
            progress=progress,
        )
    weights = task.evaluated.state_dict() if recorder.weights is None else recorder.weights
    trained.load_state_dict(weights)
    model.zero_grad(set_to_none=True)
    return Member(model.cpu().eval(), options, recorder.rows, recorder.best_epoch or len(recorder.rows))


def seconds_of_case(settings: MemberSettings, split: SequenceSplit, num_outputs: int, max_len: int) -> float:
    """Seconds in which a model of these settings answers for one series of this split, a long one."""
    longest = max(split.sequences, key=len)[:max_len]
    with plain_modes(), private_generators(settings.seed, training_device(settings.accelerator)):
        model = SequenceClassifier(longest.shape[1], num_outputs, max_len, **settings.encoder_options())
        started = now()
        predict_outputs(model.eval(), [longest])
    return now() - started


def _start(
    model: SequenceClassifier, split: SequenceSplit, start: Mapping[str, Tensor] | None, fitted_cases: int
) -> None:
    """Set the scale of the training data and what the stem takes from it, or those of a trained model."""
    if start is None:
        fit_input(model.encoder, split.sequences, fitted_cases)
        return
    try:
        model.load_state_dict(start)
    except RuntimeError:
        raise InputError(
            "warm_start=True continues the model of the last fit, and its weights do not fit a model of "
            "these parameters: restore attention and sizes, or fit with warm_start=False"
        ) from None
