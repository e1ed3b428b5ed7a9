"""The predictions of a trained model, and their figures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import confusion_matrix, r2_score
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.analysis import diagnose
from kernel_attention.errors import InputError
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import SequenceSplit, make_loader
from kernel_attention.series.outputs import predict_outputs
from kernel_attention_lab.data import SeriesColumns, SeriesFile, read_series_file
from kernel_attention_lab.data.series.own_files import label_texts, order_channels, target_values
from kernel_attention_lab.statistics import pack_bits
from kernel_attention_lab.training.recipe import BaseRecipe

_SPECTRUM_SEQUENCES = 16  # each costs an N x N decomposition per head and layer
_SPECTRUM_LENGTH = 1024


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
