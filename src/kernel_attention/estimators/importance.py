"""Which steps and channels an answer rests on: integrated gradients (Sundararajan et al. 2017)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_attention.models import SequenceClassifier
from kernel_attention.models.rocket_stem import RocketStem
from kernel_attention.series.closed_form import ClosedForm
from kernel_attention.series.views import Hydra, RandomConvolutions, Shapelets
from kernel_attention.training.modes import in_plain_modes

_POWER = 4
_SMALLEST_RUN = 1e-9  # of widths of a threshold, below which a cell has no slope of its own


class _RampAlongLine(torch.autograd.Function):
    """A ramp from 0 to 1 whose gradient at a point of a line is the mean slope around it.

    The thresholds of a rocket stem are so steep that a step crosses one between two points. The cells around
    the points, along the first dimension, fill the line, so every crossing is part of one of them.
    """

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        middles = (z[1:] + z[:-1]) / 2
        edges = torch.cat([2 * z[:1] - middles[:1], middles, 2 * z[-1:] - middles[-1:]])
        rise, run = edges.clamp(0, 1).diff(dim=0), edges.diff(dim=0)
        flat = ~(run.abs() > _SMALLEST_RUN)  # also where z is -inf, beyond the series
        inside = (z > 0) & (z < 1)
        ctx.save_for_backward(torch.where(flat, inside.to(z.dtype), rise / run.masked_fill(flat, 1.0)))
        return z.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope


class _RootAlongLine(torch.autograd.Function):
    """A root whose gradient at a point of a line is the mean slope around it, as that of the ramp in it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        middles = (x[1:] + x[:-1]) / 2
        roots = torch.cat([2 * x[:1] - middles[:1], middles, 2 * x[-1:] - middles[-1:]]).clamp_min(0).sqrt()
        # (sqrt b - sqrt a) / (b - a) = 1 / (sqrt a + sqrt b)
        ctx.save_for_backward(1 / (roots[1:] + roots[:-1]).clamp_min(_SMALLEST_RUN**0.5))
        return x.add(_SMALLEST_RUN).sqrt()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (slope,) = ctx.saved_tensors
        return grads[0] * slope


def _of_the_last(unit: Tensor) -> Tensor:
    """The unit of responses of the series itself, for all of the line: a distance in it grows evenly."""
    return unit[-1:].detach()


@in_plain_modes
def integrated_gradients(
    parts: Sequence[tuple[SequenceClassifier | ClosedForm, float]],
    series: np.ndarray,
    answer: Callable[[Tensor], Tensor],
    nodes: int,
) -> np.ndarray:
    """The share of every value of a series in an answer, (n_i, c) float64; the sum is the answer's change.

    The gradient is integrated along the straight line from the mean of the training data to the series. Views
    of a series change fastest where it is nearly constant, so the Gauss-Legendre nodes are dense there: the
    place on the line is the fourth power of the variable of integration.

    Args:
        parts: the modules whose outputs are added up, with their weights.
        series: (n_i, c).
        answer: outputs (B, k) -> (B,), the quantity to explain.
        nodes: number of gradients.
    """
    points, weights = np.polynomial.legendre.leggauss(nodes)
    places = torch.from_numpy((points + 1) / 2)
    share = torch.from_numpy(weights / 2) * _POWER * places ** (_POWER - 1)
    exact = [(copy.deepcopy(model).double().eval(), weight) for model, weight in parts]
    for model, _ in exact:
        for module in model.modules():
            if isinstance(module, RocketStem | RandomConvolutions | Hydra | Shapelets) and nodes > 1:
                module.ramp = _RampAlongLine.apply
            if isinstance(module, Hydra):
                module.unit, module.root = _of_the_last, _RootAlongLine.apply
    first = exact[0][0]
    baseline = first.input_mean if isinstance(first, ClosedForm) else first.encoder.scale_in(torch.float64)[0]
    difference = torch.from_numpy(series).double() - baseline
    line = (baseline + places[:, None, None] ** _POWER * difference).requires_grad_()
    outputs = torch.stack([weight * model(line) for model, weight in exact]).sum(dim=0)
    (gradient,) = torch.autograd.grad(answer(outputs).sum(), line)
    return (difference * (share[:, None, None] * gradient).sum(dim=0)).numpy()
