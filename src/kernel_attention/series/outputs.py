"""The outputs of a trained model of sequences, and the inputs that it can take."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.series.splits import SequenceSplit, Standardizer, in_precision, make_loader

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
