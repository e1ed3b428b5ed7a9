"""Linear, sparse and the support-vector attentions as the papers write them: float64 loops; nothing of the
library.

A causal output is the last output of the non-causal form on the prefix (the convolution, which reads forward,
is replaced by its left-padded form). Sources: primal-dual paper eq. 11, 16, 22, 25, 26, 43, 45, 49, 51;
Katharopoulos et al. 2020; Child et al. 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def support_vector_attention(
    x: Tensor,
    weights: Weights,
    mask: Tensor | None = None,
    *,
    num_heads: int,
    kernel: str = "softmax",
    feature_map: Callable[[Tensor], Tensor] | None = None,
    normalize_rows: bool = True,
    pattern: tuple[str, int, int] = ("strided", 3, 1),
    beta: float | Tensor = 0.0,
    normalize: bool = False,
    eps: float = 1e-5,
    factors: Sequence[int] | None = None,
    pooling: str = "average",
    conv: str | None = None,
    grid: tuple[int, int] | None = None,
    class_tokens: int = 0,
    context: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """y (B, N, d), zeros at padded tokens of self-attention; ``mask`` is over the keys' tokens."""
    options = {"kernel": kernel, "phi": feature_map, "normalize_rows": normalize_rows, "pattern": pattern,
               "beta": beta, "normalize": normalize, "eps": eps, "pooling": pooling}  # fmt: skip
    batch, length, width = x.shape
    p = width // num_heads
    source = x if context is None else context
    y = []
    for b in range(batch):
        seen = [j for j in range(source.shape[1]) if mask is None or bool(mask[b, j])]
        keys = [source[b, j] for j in seen]
        asking = seen if context is None else list(range(length))
        queries = [x[b, i] for i in asking]
        for_q, for_k, for_v = queries, keys, keys
        if conv == "separable":
            for_q, for_k, for_v = (
                _convolve(tokens, weights[f"convolution.{name}_kernel"], is_causal, grid, class_tokens)
                for name, tokens in (("q", queries), ("k", keys), ("v", keys))
            )
        q = [_linear(weights, "q_proj", token) for token in for_q]
        k = None
        if conv is not None:
            k = [_linear(weights, "k_proj", token) for token in for_k]
            if conv != "separable":
                kernel_q = weights["convolution.q_kernel"]
                kernel_k = weights["convolution.k_kernel"] if conv == "separate" else kernel_q
                q = _convolve(q, kernel_q, is_causal, grid, class_tokens)
                k = _convolve(k, kernel_k, is_causal, grid, class_tokens)
        v = None if k is None else [_linear(weights, "v_proj", token) for token in for_v]
        heads = []
        for h in range(num_heads):
            own = slice(h * p, (h + 1) * p)
            factor = 1 if factors is None else factors[h]
            out = []
            for n in range(len(asking)):
                if n == 0 or is_causal:  # the keys of this query are others than those of the one before
                    last = n + 1 if is_causal else len(keys)
                    if k is None:
                        blocks = _pool(keys[:last], factor, pooling, weights)
                        k_h = [_linear(weights, "k_proj", block)[own] for block in blocks]
                        v_h = [_linear(weights, "v_proj", block)[own] for block in blocks]
                    else:
                        k_h, v_h = [key[own] for key in k[:last]], [value[own] for value in v[:last]]
                    shift, scale, k_h = _normalized(k_h, options)
                out.append(_head(n, (q[n][own] - shift) * scale, k_h, v_h, factor, options))
            heads.append(out)
        rows = [torch.zeros(width, dtype=x.dtype)] * length
        for n, i in enumerate(asking):
            rows[i] = _linear(weights, "out_proj", torch.cat([out[n] for out in heads]))
        y.append(torch.stack(rows))
    return torch.stack(y)


def _normalized(keys: list[Tensor], o: Mapping[str, Any]) -> tuple[Any, Any, list[Tensor]]:
    """What is taken from queries and keys, what they are multiplied by, and the keys after both."""
    if not keys:
        return 0.0, 1.0, []
    mean = sum(keys) / len(keys)
    scale = torch.ones_like(mean)
    if o["normalize"]:
        variance = sum((key - mean) ** 2 for key in keys) / len(keys)
        scale = 1 / torch.sqrt(variance + o["eps"])
    shift = o["beta"] * mean
    return shift, scale, [(key - shift) * scale for key in keys]


def _head(
    i: int, q: Tensor, keys: list[Tensor], values: list[Tensor], factor: int, o: Mapping[str, Any]
) -> Tensor:
    """The support vector expansion of query i."""
    if not keys:
        return q * 0
    if o["kernel"] == "linear":
        phi = o["phi"] or elu
        phi_q = phi(q)
        similar = [phi_q @ phi(key) for key in keys]
    else:
        similar = [torch.exp((q @ key) / math.sqrt(q.numel())) for key in keys]
    if o["kernel"] == "sparse":
        similar = [w * allowed(o["pattern"], i, c, factor) for c, w in enumerate(similar)]
    total = sum(similar)
    if o["kernel"] == "linear" and not o["normalize_rows"]:
        total = torch.ones(())
    if total == 0:  # features that are zero throughout see no key
        return q * 0
    return sum((w * value for w, value in zip(similar, values, strict=True)), q * 0) / total


def allowed(pattern: tuple[str, int, int], i: int, block: int, factor: int) -> bool:
    """Whether query i sees some position of the block."""
    name, stride, summary = pattern
    positions = range(block * factor, (block + 1) * factor)
    if name == "strided":
        return any(abs(i - j) < stride or (i - j) % stride == 0 for j in positions)
    return any(i // stride == j // stride or j % stride >= stride - summary for j in positions)


def elu(x: Tensor) -> Tensor:
    """elu + 1."""
    return torch.stack([value + 1 if value > 0 else torch.exp(value) for value in x])


def _pool(tokens: list[Tensor], factor: int, pooling: str, weights: Weights) -> list[Tensor]:
    blocks = []
    for start in range(0, len(tokens), factor):
        members = tokens[start : start + factor]
        if pooling == "max":
            blocks.append(torch.stack(members).amax(dim=0))
        elif pooling == "conv" and factor > 1:
            kernel = weights[f"pool_kernels.{factor}"]
            blocks.append(
                sum(kernel[:, m] * token for m, token in enumerate(members)) * factor / len(members)
            )
        else:
            blocks.append(sum(members) / len(members))
    return blocks


def _convolve(
    tokens: list[Tensor], kernel: Tensor, is_causal: bool, grid: tuple[int, int] | None, class_tokens: int
) -> list[Tensor]:
    size = kernel.shape[-1]
    front = size - 1 if is_causal else size // 2
    if grid is None:
        return [
            sum(
                (
                    kernel[..., j] * tokens[i - front + j]
                    for j in range(size)
                    if 0 <= i - front + j < len(tokens)
                ),
                torch.zeros_like(tokens[0]),
            )
            for i in range(len(tokens))
        ]
    height, width = grid
    out = list(tokens[:class_tokens])
    for row in range(height):
        for column in range(width):
            total = torch.zeros_like(tokens[0])
            for a in range(size):
                for b in range(size):
                    r, c = row - front + a, column - front + b
                    if 0 <= r < height and 0 <= c < width:
                        total = total + kernel[..., a, b] * tokens[class_tokens + r * width + c]
            out.append(total)
    return out


def _linear(weights: Weights, name: str, vector: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ vector
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out
