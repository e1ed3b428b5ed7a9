"""Stacking: the weights with which the leave-one-out predictions of several predictors are added up."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_START = 3.0  # sum of the weights; outputs of -1 and 1 become log-odds of 6
_PRIOR_DEVIATION = 0.5  # of the logarithm of that sum
_EVENNESS = 0.3  # of the prior of the shares


def fit_weights(scores: Tensor, targets: Tensor, case_weights: Tensor | None = None) -> Tensor:
    """Weights w_v >= 0 of predictors, which minimise the loss of sum_v w_v scores_v, (v,) float64.

    The loss is the log-loss of softmax for class indices, or the squared error for values, summed over the
    cases. Where they are few, priors decide: a log-normal one of the sum of the weights, which is an inverse
    temperature, and a Dirichlet one of the shares in it, which makes them more even.

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
            total = total + prior - _EVENNESS * logs.log_softmax(dim=0).sum()
            total.backward()
            return total

        optimizer.step(closure)
    found = logs.detach().exp()
    return torch.where(found > 1e-4 * found.max(), found, 0.0)
