"""Which steps and channels an answer rests on: integrated gradients (Sundararajan et al. 2017)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from kernel_attention.models import SequenceClassifier

_POWER = 4


def integrated_gradients(
    models: Sequence[SequenceClassifier],
    series: np.ndarray,
    answer: Callable[[Tensor], Tensor],
    nodes: int,
) -> np.ndarray:
    """What every value of a series adds to an answer, (n_i, c) float64; the sum is the answer's change.

    The gradient is integrated along the straight line from the mean of the training data to the series. Views
    of a series change fastest where it is nearly constant, so the Gauss-Legendre nodes are dense there: the
    place on the line is the fourth power of the variable of integration.

    Args:
        models: the members of an ensemble, whose outputs are averaged.
        series: (n_i, c).
        answer: outputs (B, k) -> (B,), the quantity to explain.
        nodes: number of gradients.
    """
    points, weights = np.polynomial.legendre.leggauss(nodes)
    places = torch.from_numpy((points + 1) / 2)
    share = torch.from_numpy(weights / 2) * _POWER * places ** (_POWER - 1)
    exact = [copy.deepcopy(model).double().eval() for model in models]
    baseline = exact[0].encoder.input_mean
    difference = torch.from_numpy(series).double() - baseline
    line = (baseline + places[:, None, None] ** _POWER * difference).requires_grad_()
    with torch.enable_grad():
        outputs = torch.stack([model(line) for model in exact]).mean(dim=0)
        (gradient,) = torch.autograd.grad(answer(outputs).sum(), line)
    return (difference * (share[:, None, None] * gradient).sum(dim=0)).numpy()
