"""Regression attentions as their definitions read: one solve for every query, one update for every pair.

float64 loops over lists of tokens; nothing of the library. Sources: ridge regression; Widrow and Hoff 1960;
Schlag, Irie, Schmidhuber 2021; Yang, Kautz, Hatamizadeh 2024 (gated).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def ridge_regression(
    keys: list[Tensor], values: list[Tensor], lam: Tensor | float, gamma: Tensor | float = 1.0
) -> Tensor:
    """W (m, p) that minimises sum_j gamma^(n-1-j) |v_j - W^T k_j|^2 + gamma^n lambda |W|^2."""
    gram = lam * torch.eye(len(keys[0]), dtype=keys[0].dtype)
    target = torch.zeros(len(keys[0]), len(values[0]), dtype=keys[0].dtype)
    for k, v in zip(keys, values, strict=True):
        gram = gamma * gram + torch.outer(k, k)
        target = gamma * target + torch.outer(k, v)
    return torch.linalg.solve(gram, target)


def delta_rule(keys: list[Tensor], values: list[Tensor], betas: list[Tensor], alphas: list[Tensor]) -> Tensor:
    """W (m, p) after one pass over the pairs, from zero."""
    weight = torch.zeros(len(keys[0]), len(values[0]), dtype=keys[0].dtype)
    for k, v, beta, alpha in zip(keys, values, betas, alphas, strict=True):
        weight = alpha * weight
        weight = weight + beta * torch.outer(k, v - weight.mT @ k)
    return weight


def regression_attention(
    x: Tensor,
    weights: Weights,
    mask: Tensor | None = None,
    *,
    num_heads: int,
    is_causal: bool = False,
    context: Tensor | None = None,
    feature_map: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """y (B, N, d), zeros at padded tokens of self-attention; ``mask`` is over the keys' tokens.

    The delta rule where the weights have a projection of its steps, ridge regression elsewhere.
    """
    phi = unit if feature_map is None else feature_map
    source = x if context is None else context
    p = x.shape[2] // num_heads
    y = torch.zeros_like(x)
    for b in range(len(x)):
        seen = [j for j in range(source.shape[1]) if mask is None or bool(mask[b, j])]
        asking = seen if context is None else list(range(x.shape[1]))
        for n, i in enumerate(asking):
            heads = []
            for h in range(num_heads):
                own = slice(h * p, (h + 1) * p)
                tokens = [source[b, j] for j in (seen[: n + 1] if is_causal else seen)]
                keys = [phi(_linear(weights, "k_proj", token)[own]) for token in tokens]
                values = [_linear(weights, "v_proj", token)[own] for token in tokens]
                fitted = _fit(weights, h, tokens, keys, values)
                heads.append(fitted.mT @ phi(_linear(weights, "q_proj", x[b, i])[own]))
            y[b, i] = _linear(weights, "out_proj", torch.cat(heads))
    return y


def _fit(weights: Weights, h: int, tokens: list[Tensor], keys: list[Tensor], values: list[Tensor]) -> Tensor:
    if "kernel.raw_lambda" in weights:
        lam = torch.log(1 + torch.exp(weights["kernel.raw_lambda"][h]))
        gamma: Tensor | float = 1.0
        if "kernel.raw_forgetting" in weights:
            gamma = 0.9 + 0.1 / (1 + torch.exp(-weights["kernel.raw_forgetting"][h]))
        return ridge_regression(keys, values, lam, gamma)
    steps = [_linear(weights, "step_proj", token)[h] for token in tokens]
    betas = [1 / (1 + torch.exp(-step)) for step in steps]
    alphas = [torch.ones(())] * len(tokens)
    if "decay_proj.weight" in weights:
        alphas = [1 / (1 + torch.exp(-_linear(weights, "decay_proj", token)[h])) for token in tokens]
    return delta_rule(keys, values, betas, alphas)


def unit(x: Tensor) -> Tensor:
    """x / |x|."""
    return x / torch.sqrt((x * x).sum())


def _linear(weights: Weights, name: str, x: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ x
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
