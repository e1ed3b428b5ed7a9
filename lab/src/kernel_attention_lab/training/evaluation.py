"""The predictions of a trained model, and their figures."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from sklearn.metrics import confusion_matrix, r2_score
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.analysis import diagnose
from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention_lab.data import (
    SequenceSplit,
    SeriesColumns,
    SeriesFile,
    Standardizer,
    make_loader,
    read_series_file,
)
from kernel_attention_lab.data.series.own_files import label_texts, order_channels, target_values
from kernel_attention_lab.data.series.time_series import in_precision
from kernel_attention_lab.statistics import pack_bits
from kernel_attention_lab.training.recipe import BaseRecipe

AnyBatch = TypeVar("AnyBatch", bound=Any)

_SPECTRUM_SEQUENCES = 16  # each costs an N x N decomposition per head and layer
_SPECTRUM_LENGTH = 1024
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
    """What the head of a classifier reads."""

    def __init__(self, model: SequenceClassifier) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
        return self.model.embed(x, attention_mask)


def classification_figures(logits: Tensor, targets: np.ndarray) -> dict[str, Any]:
    """Accuracy, loss, the confusion matrix (rows: true classes), and the bits of which cases are right."""
    target, predicted = torch.as_tensor(targets), logits.argmax(dim=-1)
    return {
        "accuracy": (predicted == target).double().mean().item(),
        "loss": F.cross_entropy(logits, target).item(),
        "confusion_matrix": confusion_matrix(target, predicted, labels=range(logits.size(-1))).tolist(),
        "cases": len(target),
        "correct_bits": pack_bits((predicted == target).numpy()),
    }


def evaluate_split(
    model: SequenceClassifier, split: SequenceSplit, recipe: BaseRecipe, is_regression: bool
) -> dict[str, Any]:
    """Loss and metric of a split; the confusion matrix (rows: true classes) in classification."""
    outputs = predict_outputs(model, split, recipe.batch_size, recipe.precision)
    if is_regression:
        error = F.mse_loss(outputs.squeeze(-1), torch.as_tensor(split.targets).float()).item()
        r2 = float(r2_score(split.targets, outputs.squeeze(-1).numpy())) if len(split) > 1 else None
        return {"rmse": error**0.5, "r2": r2, "loss": error, "cases": len(split)}
    return classification_figures(outputs, split.targets)


def kernel_spectra(model: SequenceClassifier, split: SequenceSplit) -> dict[str, Any]:
    """The content of ``spectra.json``: spectra of every layer's kernel on the first test sequences."""
    sequences = [sequence for sequence in split.sequences if len(sequence) <= _SPECTRUM_LENGTH]
    if not sequences:
        return {"layers": [], "note": f"no test sequence of at most {_SPECTRUM_LENGTH} steps"}
    batches = make_loader(sequences[:_SPECTRUM_SEQUENCES], 4)
    report = diagnose(model, batches, cases=_SPECTRUM_SEQUENCES, quantities=("spectrum",))
    layers = [
        {
            "layer": layer.index,
            "mechanism": layer.mechanism,
            "singular_values": layer.values["singular_values"].tolist(),
        }
        for layer in report.layers
        if "singular_values" in layer.values
    ]
    count = min(len(sequences), _SPECTRUM_SEQUENCES)
    return {"layers": layers, "note": f"means over {count} test sequences of values relative to the largest"}


def fitting_file(path: Path, facts: dict[str, Any], missing: str, columns: SeriesColumns) -> SeriesFile:
    """The series of a file, checked against the facts of the training data, with its channels in their order.

    Raises:
        InputError: for a bad file, other channels and longer series than the model takes.
    """
    names = facts.get("channel_names") or list(columns.channels)
    file = order_channels(read_series_file(path, missing, columns), names, str(path), "the run")
    check_sequences(file.sequences, facts, str(path))
    return file


def labelled_split(
    path: Path, facts: dict[str, Any], missing: str, columns: SeriesColumns | None = None
) -> SequenceSplit:
    """The sequences and targets of a labelled file, checked against the facts of the training data."""
    file = fitting_file(path, facts, missing, columns or SeriesColumns())
    if file.labels is None:
        raise InputError(f"{path}: has no labels to evaluate against")
    labels = label_texts(file, str(path))
    if facts["task"] == "regression":
        try:
            return SequenceSplit(file.sequences, target_values(labels, str(path)))
        except InputError as error:
            raise InputError(
                f"{error}: the model predicts values, but the labels are not finite numbers"
            ) from None
    names = list(facts["class_names"])
    unseen = sorted(set(labels) - set(names))
    if unseen:
        raise InputError(f"{path}: labels {unseen} were not seen in training (accepted: {', '.join(names)})")
    return SequenceSplit(file.sequences, np.array([names.index(label) for label in labels], dtype=np.int64))


def predict_rows(
    model: SequenceClassifier,
    sequences: Sequence[np.ndarray],
    facts: dict[str, Any],
    precision: str,
    cases: Sequence[str] | None = None,
) -> list[dict[str, Any]]:
    """One record per sequence: the value, or the class and the probability of every class.

    ``cases`` are the names of the sequences; without them they have numbers.
    """
    named = range(len(sequences)) if cases is None else cases
    outputs = predict_outputs(model, sequences, precision=precision)
    if facts["task"] == "regression":
        values = outputs.squeeze(-1).tolist()
        return [{"case": case, "prediction": value} for case, value in zip(named, values, strict=True)]
    names = facts["class_names"]
    return [
        {"case": case, "prediction": names[int(np.argmax(row))]}
        | {f"probability_{name}": value for name, value in zip(names, row, strict=True)}
        for case, row in zip(named, outputs.softmax(dim=-1).tolist(), strict=True)
    ]


def check_sequences(sequences: Sequence[np.ndarray], facts: dict[str, Any], where: str) -> None:
    """InputError where sequences do not fit a model trained on data with these facts."""
    for case, sequence in enumerate(sequences):
        channels = sequence.shape[1]
        if channels != facts["num_features"]:
            raise InputError(
                f"{where}: case {case} has {channels} channels, the model takes {facts['num_features']}"
            )
        if len(sequence) > facts["max_len"]:
            raise InputError(
                f"{where}: case {case} has {len(sequence)} steps, the model takes at most {facts['max_len']} "
                "(the longest sequence of its data set)"
            )


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
