"""The temperature that makes the probabilities of a classifier honest (Guo et al. 2017)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_RANGE = 3.0  # of the temperature's logarithm, on both sides of 0
_PRIOR_DEVIATION = 0.5  # of the temperature's logarithm
_HALVINGS = 60


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature T at which softmax(logits / T) is most likely, a posteriori, on held-out cases.

    The logarithm of T has a normal prior of mean 0 and deviation 1/2. It decides where there are few cases: a
    model that is right in all of them would otherwise become certain of everything.

    Args:
        logits: (n, k), of cases that did not train the model.
        targets: (n,) class indices.
    """
    logits, targets = logits.double(), torch.as_tensor(targets)

    def surprise(log_temperature: float) -> float:
        nll = F.cross_entropy(logits / torch.tensor(log_temperature).double().exp(), targets, reduction="sum")
        return nll.item() + (log_temperature / _PRIOR_DEVIATION) ** 2 / 2

    low, high = -_RANGE, _RANGE
    for _ in range(_HALVINGS):  # each keeps two thirds of the interval
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if surprise(first) <= surprise(second):
            high = second
        else:
            low = first
    return float(torch.tensor((low + high) / 2).double().exp())
