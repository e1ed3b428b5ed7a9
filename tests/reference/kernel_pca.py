"""RPC-Attention and Scaled Attention as the kernel-PCA paper writes them: loops; nothing of the library.

Sources: algorithm 1 (Principal Attention Pursuit) with mu of definition 1, eq. 12 with the two
parameterisations of section 4.3, and what the released code does instead where it differs. The multiplier Y
and the step size mu are kept as printed. The gradients are autograd's, so one oracle serves both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def rpc(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    iterations: int,
    lam: float,
    convention: str,
    is_causal: bool = False,
) -> tuple[Tensor, float]:
    """y (B, N, d), zero at padded tokens, and the share of entries of the last S that are not zero.

    ``weights`` are named as the layer's parameters; the form is asymmetric where they have a ``q_proj``.
    """
    batch, length, width = x.shape
    y, nonzero, entries = [], 0, 0
    for b in range(batch):
        real = [i for i in range(length) if mask is None or bool(mask[b, i])]
        heads = []
        for h in range(num_heads):
            low_rank, sparse = _pursuit(
                [x[b, i] for i in real], weights, h, num_heads, iterations, lam, convention, is_causal
            )
            heads.append(low_rank)
            nonzero += sum(int((row != 0).sum()) for row in sparse)
            entries += len(sparse) * (width // num_heads)
        rows = [torch.zeros(width, dtype=x.dtype)] * length
        for n, i in enumerate(real):
            rows[i] = _linear(weights, "out_proj", torch.cat([head[n] for head in heads]))
        y.append(torch.stack(rows))
    return torch.stack(y), nonzero / entries


def _pursuit(tokens, weights, h, num_heads, iterations, lam, convention, is_causal):
    """L and S of one head of one sequence, as lists of rows."""
    width = tokens[0].numel()
    p = width // num_heads
    own = slice(h * p, (h + 1) * p)
    k = [_linear(weights, "k_proj", token)[own] for token in tokens]
    v = [_linear(weights, "v_proj", token)[own] for token in tokens]
    q = [_linear(weights, "q_proj", token)[own] for token in tokens] if "q_proj.weight" in weights else None
    mu, threshold = [], []
    for i in range(len(k)):
        seen = k[: i + 1] if is_causal else k
        norm = sum(row.abs().sum() for row in seen)
        mu.append(len(seen) * (p if convention == "paper" else width) / (4 * norm))
        threshold.append(lam / mu[i] if convention == "paper" else lam * mu[i])
    s, y, low = [[torch.zeros_like(row) for row in k] for _ in range(3)]
    for _ in range(iterations):
        s = [_shrink(k[i] - low[i] + y[i] / mu[i], threshold[i]) for i in range(len(k))]
        t = [k[i] - s[i] - y[i] / mu[i] for i in range(len(k))]
        low = [_attend((t if q is None else q)[i], t, v, i if is_causal else None) for i in range(len(k))]
        y = [y[i] + mu[i] * (k[i] - low[i] - s[i]) for i in range(len(k))]
    return low, s


def _shrink(row: Tensor, threshold: Tensor) -> Tensor:
    entries = []
    for entry in row:
        if entry > threshold:
            entries.append(entry - threshold)
        elif entry < -threshold:
            entries.append(entry + threshold)
        else:
            entries.append(entry * 0.0)
    return torch.stack(entries)


def _attend(query: Tensor, keys: list[Tensor], values: list[Tensor], last: int | None) -> Tensor:
    seen = range(len(keys)) if last is None else range(last + 1)
    return sum(w * values[j] for w, j in zip(_softmax(query, [keys[j] for j in seen]), seen, strict=True))


def _softmax(query: Tensor, keys: list[Tensor]) -> list[Tensor]:
    similarity = [torch.exp((query @ key) / math.sqrt(query.numel())) for key in keys]
    total = sum(similarity)
    return [value / total for value in similarity]


def scaled(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    context: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """y (B, N, d); ``mask`` is over the keys' tokens; S is ``weights["s"]`` or ``weights["alpha"]`` A_sym."""
    batch, length, width = x.shape
    source = x if context is None else context
    p = width // num_heads
    y = []
    for b in range(batch):
        real = [j for j in range(source.shape[1]) if mask is None or bool(mask[b, j])]
        heads: list[list[Tensor]] = []
        for h in range(num_heads):
            own = slice(h * p, (h + 1) * p)
            k = [_linear(weights, "k_proj", source[b, j])[own] for j in real]
            v = [_linear(weights, "v_proj", source[b, j])[own] for j in real]
            values = []
            for n in range(len(real)):
                seen = range(n + 1) if is_causal else range(len(real))
                row = (
                    [weights["s"][h, n, m] for m in seen] if "s" in weights
                    else [weights["alpha"][0] * a for a in _softmax(k[n], [k[m] for m in seen])]
                )  # fmt: skip
                values.append(v[n] - sum(s_nm * v[m] for s_nm, m in zip(row, seen, strict=True)))
            out = []
            for i in range(length):
                q = _linear(weights, "q_proj", x[b, i])[own]
                seen = [n for n, j in enumerate(real) if j <= i or not is_causal]
                attention = _softmax(q, [k[n] for n in seen])
                out.append(sum((a * values[n] for a, n in zip(attention, seen, strict=True)), q * 0.0))
            heads.append(out)
        y.append(
            torch.stack([_linear(weights, "out_proj", torch.cat(rows)) for rows in zip(*heads, strict=True)])
        )
    return torch.stack(y)


def _linear(weights: Mapping[str, Tensor], name: str, vector: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ vector
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
