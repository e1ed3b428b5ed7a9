"""The outputs of a trained model of sequences, the inputs that it can take, its readout in closed form."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.series.batches import make_loader
from kernel_attention.series.splits import SequenceSplit, Standardizer, in_precision
from kernel_attention.solvers import least_squares_svm

AnyBatch = TypeVar("AnyBatch", bound=Any)

# The root of the largest float32 is 1.8e19; weights, widths and sums over them take the rest.
LARGEST = 1e15


def collect_outputs(model: nn.Module, batches: Iterable[Any], precision: str = "32-true") -> Tensor:
    """The outputs of every case in the order of the batches, in training's precision; float32 on CPU."""
    return torch.cat([outputs for outputs, _ in batch_outputs(model, batches, precision)])


@torch.inference_mode()
def batch_outputs(
    model: nn.Module, batches: Iterable[AnyBatch], precision: str = "32-true"
) -> Iterator[tuple[Tensor, AnyBatch]]:
    """(outputs, batch) of every batch, in training's precision; the outputs are float32 on CPU."""
    model.eval()
    device = next(model.parameters()).device
    dtype = torch.bfloat16 if precision.startswith("bf16") else torch.float16
    for batch in batches:
        with torch.autocast(device.type, dtype=dtype, enabled=precision.endswith("-mixed")):
            outputs = model(*(argument.to(device) for argument in batch.arguments))
        yield outputs.float().cpu(), batch


def predict_outputs(
    model: SequenceClassifier,
    sequences: SequenceSplit | Sequence[np.ndarray],
    batch_size: int = 64,
    precision: str = "32-true",
    *,
    pooled: bool = False,
) -> Tensor:
    """Logits or values of every sequence, (cases, outputs); see ``collect_outputs``.

    With ``pooled``, what the head reads, (cases, width).

    Raises:
        InputError: for a sequence with a value that is too large for the model.
    """
    cases = sequences.sequences if isinstance(sequences, SequenceSplit) else sequences
    scale = model_scale(model)
    require_in_range(cases, scale.mean, scale.std)
    called = _Pooled(model) if pooled else model
    batches = make_loader(in_precision(cases, scale.dtype), batch_size)
    outputs = collect_outputs(called, batches, precision)
    require_finite_outputs(outputs, cases)
    return outputs


def model_scale(model: SequenceClassifier) -> Standardizer:
    """The scale that is part of a model's weights."""
    encoder = model.encoder  # on the CPU, because not every device has float64
    mean, rest, std = (
        part.cpu().double().numpy()
        for part in (encoder.input_mean, encoder.input_mean_rest, encoder.input_std)
    )
    return Standardizer(mean + rest, std)


class _Pooled(nn.Module):
    """Return the input of a classifier's head."""

    def __init__(self, model: SequenceClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.embed(x, attention_mask)


def require_in_range(
    sequences: Sequence[np.ndarray], mean: np.ndarray, std: np.ndarray, where: str = "the sequences"
) -> None:
    """Refuse sequences (n_i, c) with a value beyond 1e15 standard deviations of the training data.

    Such a value is finite and yet too large for a model in float32. A network squares what it is given: layer
    norms sum squares, attention multiplies queries with keys. Beyond the root of the largest float32 the
    squares are infinite, and what comes out is NaN, or, behind a layer norm, a finite answer that does not
    depend on the input.

    Args:
        sequences: float32, one array a case.
        mean: of every channel, (c,).
        std: of every channel, (c,).
        where: what the sequences are called in the message.

    Raises:
        InputError: which names the case, the channel, the step and the value.
    """
    for case, sequence in enumerate(sequences):
        scaled = np.abs((sequence.astype(np.float64) - mean) / std)
        if scaled.max() > LARGEST:
            step, channel = np.unravel_index(scaled.argmax(), scaled.shape)
            raise InputError(
                f"case {case} of {where}: value {sequence[step, channel]:g} in channel {channel}, "
                f"step {step} is {scaled.max():.0e} standard deviations from the training data "
                f"(the model takes up to {LARGEST:.0e})"
            )


def require_finite_outputs(outputs: Tensor, sequences: Sequence[np.ndarray]) -> None:
    """Refuse outputs (cases, k) that are no numbers, and name the largest value that led to one.

    Raises:
        InputError: which names the case, the channel, the step and the value.
    """
    failed = (~outputs.isfinite().all(dim=-1)).nonzero()
    if len(failed):
        case = int(failed[0])
        sequence = np.abs(sequences[case])
        step, channel = np.unravel_index(sequence.argmax(), sequence.shape)
        raise InputError(
            f"case {case} of the sequences: the model's output is not finite; its largest value is "
            f"{sequences[case][step, channel]:g} in channel {channel}, step {step}"
        )


_SMALLEST_DEVIATION = 1e-3  # of a feature's mean over the tokens
_RANGE = 3.0  # of the temperature's logarithm, on both sides of 0
_PRIOR_DEVIATION = 0.5  # of the temperature's logarithm
_HALVINGS = 60


def fit_readout(
    model: SequenceClassifier, features: Iterable[np.ndarray], split: SequenceSplit, is_regression: bool
) -> None:
    """Set the readout of a model, whose stem is fitted.

    Classes have targets of -1 and 1. The temperature at which the leave-one-out outputs are most likely makes
    logits of them.

    Args:
        model: with ``readout=True``.
        features: of the training series, (M_i, F) each.
        split: whose targets and weights count.
        is_regression: whether the outputs are values.
    """
    read = torch.stack([torch.from_numpy(part).float().mean(dim=0) for part in features])
    deviation, mean = torch.std_mean(read, dim=0, correction=0)
    deviation = deviation.clamp_min(_SMALLEST_DEVIATION)
    read = read.sub_(mean).div_(deviation)
    targets = torch.as_tensor(split.targets)
    if is_regression:
        wanted = targets.reshape(len(targets), -1)
    else:
        wanted = 2.0 * F.one_hot(targets, len(model.readout_bias)) - 1
    if len(read) == 1:  # nothing is left when it is left out
        model.set_readout(torch.tensor(0.0), wanted[0])
        return
    weights = None if split.weights is None else torch.as_tensor(split.weights)
    machine = least_squares_svm(read, wanted, sample_weight=weights)
    temperature = 1.0 if is_regression else fit_temperature(machine.left_out, targets)
    weight = machine.weight / (temperature * deviation[:, None])
    model.set_readout(weight.mT, machine.intercept / temperature - mean @ weight)


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature T at which softmax(logits / T) is most likely, a posteriori (Guo et al. 2017).

    The logarithm of T has a normal prior of mean 0 and deviation 1/2. It decides where there are few cases: a
    model that is right in all of them would otherwise become certain of everything.

    Args:
        logits: (n, k), of held-out cases, which did not train the model.
        targets: (n,) class indices.
    """
    logits, targets = logits.double(), torch.as_tensor(targets)

    def surprise(log_temperature: float) -> float:
        nll = F.cross_entropy(
            logits / torch.tensor(log_temperature, dtype=torch.float32).double().exp(),
            targets,
            reduction="sum",
        )
        return nll.item() + (log_temperature / _PRIOR_DEVIATION) ** 2 / 2

    low, high = -_RANGE, _RANGE
    for _ in range(_HALVINGS):  # each keeps two thirds of the interval
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if surprise(first) <= surprise(second):
            high = second
        else:
            low = first
    return float(torch.tensor((low + high) / 2, dtype=torch.float32).double().exp())
