"""Three attentions to the same thirty training inputs, at queries near to them and far from them.

Keys are inputs on a line, values their classes, -1 and 1. Softmax attention is the mean of the classes, by
the similarity of the query. The two Gaussian processes have the posterior of regression on the classes with
noise, in closed form: the best variational parameters of ``sgpa`` with an inducing key at every training
input, and of ``kernel_gp`` with the leading singular vectors of the kernel as scores.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kernel_attention.functional import PrimalScores, kernel_gp_posterior, sgpa_posterior, softmax_attention

TRAINING = 30
NOISE = 0.5  # of the classes, a deviation
RANK = 6
_SHARPNESS = 3.0  # of the similarity of softmax attention
_JITTER = 1e-6


def training_inputs() -> tuple[Tensor, Tensor]:
    """Inputs (30, 1) in two overlapping groups around -1 and 1, and their classes -1 and 1, (30, 1)."""
    places = torch.linspace(-1, 1, TRAINING // 2, dtype=torch.float64)
    x = torch.cat([places - 0.8, places + 0.8])[:, None]
    return x, torch.cat([-torch.ones(len(places)), torch.ones(len(places))]).double()[:, None]


def kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-(x - y)^2 / 2) of (n, 1) and (m, 1)."""
    return (-0.5 * (x - y.mT).square()).exp()


def softmax_probability(queries: Tensor) -> Tensor:
    """The share of class 1 in softmax attention to the training inputs, (n,)."""
    x, classes = training_inputs()
    q, k, v = (each[None, None] for each in (_SHARPNESS * queries, x, classes))
    return (softmax_attention(q, k, v).reshape(-1) + 1) / 2


def sparse_posterior(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``sgpa`` at the queries, (n,) each."""
    x, classes = training_inputs()
    k_zz = kernel(x, x) + _JITTER * torch.eye(len(x), dtype=x.dtype)
    factor = torch.linalg.cholesky(k_zz)
    values = torch.linalg.solve(k_zz + NOISE**2 * torch.eye(len(x), dtype=x.dtype), classes)
    whitened = torch.linalg.inv(torch.eye(len(x), dtype=x.dtype) + factor.mT @ factor / NOISE**2)
    found = sgpa_posterior(
        queries[None, None], torch.zeros_like(queries)[None, None], x[None], values[None],
        torch.linalg.cholesky(whitened)[None, None], x.new_zeros(1), x.new_zeros(1, 1), jitter=_JITTER,
    )  # fmt: skip
    return found.mean.reshape(-1), found.variance.reshape(-1)


def kernel_eigen_posterior(queries: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and variance of ``kernel_gp`` of rank 6 at the queries, (n,) each."""
    x, classes = training_inputs()
    u, sigma, _ = torch.linalg.svd(kernel(x, x))
    u, sigma = u[:, :RANK], sigma[:RANK]
    # e + r = 2 U Sigma at the training inputs, and Lambda = Sigma^{-1}: rows 2 U with prior N(0, Sigma^2).
    rows = 2 * u
    covariance = torch.linalg.inv((sigma**-2).diag() + rows.mT @ rows / NOISE**2)
    mean = covariance @ rows.mT @ classes / NOISE**2
    scores = (kernel(queries, x) @ u)[None, None]
    cholesky = torch.linalg.cholesky(covariance)[None, None]
    log_sqrt_lambda = -0.5 * sigma.log()[None]
    found = kernel_gp_posterior(PrimalScores(scores, scores), log_sqrt_lambda, mean[None], cholesky)
    return found.mean.reshape(-1), found.variance.reshape(-1)


def far_from_data() -> Iterator[dict[str, object]]:
    """Curves over the query: the probability of class 1, and the deviation of each process."""
    queries = torch.linspace(-8, 8, 161, dtype=torch.float64)[:, None]
    at = queries.reshape(-1).tolist()

    def curve(row: str, panel: str, values: Tensor) -> dict[str, object]:
        points = [[round(x, 3), round(y, 4)] for x, y in zip(at, values.tolist(), strict=True)]
        return {"row": row, "panel": panel, "points": points}

    yield curve("softmax", "probability of class 1", softmax_probability(queries))
    for row, posterior in (("sgpa", sparse_posterior), ("kernel_gp", kernel_eigen_posterior)):
        mean, variance = posterior(queries)
        chance = 0.5 + 0.5 * torch.erf(mean / (2 * (variance + NOISE**2)).sqrt())
        yield curve(row, "probability of class 1", chance)
        yield curve(row, "standard deviation", variance.sqrt())
    x, _ = training_inputs()
    for panel in ("probability of class 1", "standard deviation"):
        ends = [x.min().item(), x.max().item()]
        yield {"row": "training inputs", "panel": panel, "points": [[end, 0.0] for end in ends]}
