"""The readout of a rocket stem: a least-squares support vector machine on its features, in closed form."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.models import SequenceClassifier
from kernel_attention.series.splits import SequenceSplit
from kernel_attention.solvers import least_squares_svm

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
