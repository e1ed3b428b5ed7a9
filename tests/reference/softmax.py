"""The baselines as their formulas read: float64 loops over sequence, head and query, without the library."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    kernel: str = "softmax",
    symmetric: bool = False,
    context: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """y (B, N, d); ``mask`` is over the keys' tokens, ``kernel`` "softmax" or "cosine"."""
    batch, length, width = x.shape
    source = x if context is None else context
    p = width // num_heads
    y = []
    for b in range(batch):
        keys = [j for j in range(source.shape[1]) if mask is None or bool(mask[b, j])]
        k = {j: _linear(weights, "q_proj" if symmetric else "k_proj", source[b, j]) for j in keys}
        v = {j: _linear(weights, "v_proj", source[b, j]) for j in keys}
        rows = []
        for i in range(length):
            q, heads = _linear(weights, "q_proj", x[b, i]), []
            seen = [j for j in keys if j <= i or not is_causal]
            for h in range(num_heads):
                own = slice(h * p, (h + 1) * p)
                weights_h = _weights(q[own], [k[j][own] for j in seen], kernel)
                heads.append(sum((w * v[j][own] for w, j in zip(weights_h, seen, strict=True)), q[own] * 0))
            rows.append(_linear(weights, "out_proj", torch.cat(heads)))
        y.append(torch.stack(rows))
    return torch.stack(y)


def _weights(q: Tensor, k: list[Tensor], kernel: str) -> list[Tensor]:
    if kernel == "cosine":
        return [(q @ k_j) / (q.norm() * k_j.norm()) for k_j in k]
    similarity = [torch.exp((q @ k_j) / math.sqrt(q.numel())) for k_j in k]
    total = sum(similarity)
    return [value / total for value in similarity]


def _linear(weights: Mapping[str, Tensor], name: str, vector: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ vector
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
