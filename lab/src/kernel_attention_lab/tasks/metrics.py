"""The metrics of classifications, and the rows of predicted classes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention_lab.packing import pack_bits


def classification_metrics(logits: Tensor, targets: np.ndarray) -> dict[str, Any]:
    """Accuracy, loss, the confusion matrix (rows: true classes), and the bits of which cases are right."""
    target, predicted = torch.as_tensor(targets), logits.argmax(dim=-1)
    return {
        "accuracy": (predicted == target).double().mean().item(),
        "loss": F.cross_entropy(logits, target).item(),
        "confusion_matrix": count_pairs(target, predicted, logits.size(-1)).tolist(),
        "cases": len(target),
        "correct_bits": pack_bits((predicted == target).numpy()),
    }


def count_pairs(target: Tensor, predicted: Tensor, classes: int) -> Tensor:
    """Cases by true and predicted class, (K, K) int64."""
    pairs = target.long() * classes + predicted.long()
    return torch.bincount(pairs.flatten(), minlength=classes * classes).view(classes, classes).cpu()


def class_rows(
    probabilities: Tensor, names: Sequence[str], cases: Iterable[Any] | None = None, key: str = "case"
) -> list[dict[str, Any]]:
    """A row a case: its name under ``key`` (by default its number), the class, every class's probability."""
    rows = probabilities.tolist()
    return [
        {key: case, "prediction": names[int(np.argmax(row))]}
        | {f"probability_{name}": value for name, value in zip(names, row, strict=True)}
        for case, row in zip(range(len(rows)) if cases is None else cases, rows, strict=True)
    ]
