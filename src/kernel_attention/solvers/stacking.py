"""Stacking: the weights with which the leave-one-out predictions of several predictors are added up."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

_START = 3.0  # sum of the weights; outputs of -1 and 1 become log-odds of 6
_PRIOR_DEVIATION = 0.5  # of the logarithm of that sum
_NEWTON_STEPS = 30
_SMALLEST_STEP = 1e-5


def fit_weights(scores: Tensor, targets: Tensor, case_weights: Tensor | None = None) -> Tensor:
    """Weights w_v >= 0 of predictors, which minimise the loss of sum_v w_v scores_v, (v,) float64.

    The loss is the log-loss of softmax for class indices, or the squared error for values. The sum of the
    weights, which is an inverse temperature, has a log-normal prior: where few cases are all right, it
    decides.

    Args:
        scores: (v, n, k) float64, of cases that did not train the predictors.
        targets: (n,) int64, or (n, k) values.
        case_weights: (n,); None: all 1.
    """
    is_regression = targets.is_floating_point()
    middle = 1.0 if is_regression else _START
    scores = scores.detach()
    with torch.enable_grad():
        logs = torch.full((len(scores),), middle / len(scores), dtype=torch.float64).log().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [logs], lr=1.0, max_iter=50, tolerance_change=1e-7, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            weights = logs.exp()
            mixed = torch.tensordot(weights, scores, dims=1)
            if is_regression:
                losses = (mixed - targets).square().mean(dim=-1)
            else:
                losses = F.cross_entropy(mixed, targets, reduction="none")
            total = losses.sum() if case_weights is None else losses @ case_weights
            prior = ((weights.sum() / middle).log() / _PRIOR_DEVIATION).square() / 2
            total = total + prior
            total.backward()
            return total

        optimizer.step(closure)
    found = logs.detach().exp()
    return torch.where(found > 1e-4 * found.max(), found, 0.0)


def weight_of_one(scores: Tensor, targets: Tensor, case_weights: Tensor | None) -> float:
    """The weight that ``fit_weights`` gives to a single predictor of classes, by Newton's method."""
    own = scores.gather(1, targets[:, None])[:, 0]
    counts = torch.ones_like(own) if case_weights is None else case_weights
    log = start = math.log(_START)
    for _ in range(_NEWTON_STEPS):
        weight = math.exp(log)
        shares = (weight * scores).softmax(dim=-1)
        mean = (shares * scores).sum(dim=-1)
        variance = (shares * scores.square()).sum(dim=-1) - mean.square()
        slope = weight * float(counts @ (mean - own)) + (log - start) / _PRIOR_DEVIATION**2
        # The curvature in the logarithm, without the part that may be negative.
        curve = weight**2 * float(counts @ variance) + 1 / _PRIOR_DEVIATION**2
        curve += max(weight * float(counts @ (mean - own)), 0.0)
        step = min(max(slope / curve, -1.0), 1.0)
        log -= step
        if abs(step) < _SMALLEST_STEP:
            break
    return math.exp(log)


def log_loss(logits: Tensor, targets: Tensor, case_weights: Tensor | None) -> float:
    """The mean log-loss of softmax, the cases weighted."""
    losses = F.cross_entropy(logits, targets, reduction="none")
    return float(losses.mean() if case_weights is None else losses @ case_weights / len(targets))
