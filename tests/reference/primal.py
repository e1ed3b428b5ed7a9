"""Primal-Attention as the paper writes it: float64 loops over sequence, head and token, without the library.

Sources: paper eq. 6-11 through the supplement's eq. (1) and (5), algorithm 1 and listing 1. The gradients of
the loops are autograd's, so one oracle serves outputs and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor


class Result(NamedTuple):
    """y (B, N, d) with zeros at padded tokens; e and r: {(b, h): (n_b, s)}; what J is made of.

    ``energy`` (B,) is 1/2 sum_i (e_i^T Lambda e_i + r_i^T Lambda r_i) and ``trace`` Tr(W_e^T W_r), averaged
    over the heads.
    """

    y: Tensor
    e: dict[tuple[int, int], Tensor]
    r: dict[tuple[int, int], Tensor]
    energy: Tensor
    trace: Tensor

    def objective(self, form: str, square_per: str) -> Tensor:
        """J of every sequence, (B,), or of the batch; "sum" over tokens (paper) or "mean" (released code)."""
        tokens = torch.tensor([self.e[b, 0].shape[0] for b in range(len(self.energy))])
        if square_per == "sequence":
            return (self.energy / tokens if form == "mean" else self.energy) - self.trace
        return (self.energy.sum() / tokens.sum() if form == "mean" else self.energy.mean()) - self.trace


def primal_attention(
    x: Tensor,
    weights: Mapping[str, Tensor],
    mask: Tensor | None = None,
    *,
    num_heads: int,
    num_rows: int | None,
    max_len: int | None = None,
    is_causal: bool = False,
    running_means: bool = True,
    cosine: bool = True,
) -> Result:
    """``weights`` have the names of the layer's parameters; ``num_rows`` is M, None if data-independent."""
    batch, length, width = x.shape
    e, r, y = {}, {}, []
    for b in range(batch):
        real = [i for i in range(length) if mask is None or bool(mask[b, i])]
        tokens = [x[b, i] for i in real]
        for h in range(num_heads):
            e[b, h], r[b, h] = _head(
                tokens, weights, h, width // num_heads, num_rows, max_len, is_causal, running_means, cosine
            )
        rows = [torch.zeros(width, dtype=x.dtype)] * length
        for n, i in enumerate(real):
            heads = [
                _linear(weights, "concat", torch.cat([e[b, h][n], r[b, h][n]])) for h in range(num_heads)
            ]
            rows[i] = _linear(weights, "out_proj", torch.cat(heads))
        y.append(torch.stack(rows))
    return Result(torch.stack(y), e, r, *_objective_parts(e, r, weights, batch, num_heads))


def _head(tokens, weights, h, p, num_rows, max_len, is_causal, running_means, cosine):
    """e (n, s) and r (n, s) of one head of one sequence."""
    own = slice(h * p, (h + 1) * p)
    q = [_linear(weights, "q_proj", token)[own] for token in tokens]
    k = [_linear(weights, "k_proj", token)[own] for token in tokens]
    if is_causal and running_means:
        q = [sum(q[: i + 1]) / (i + 1) for i in range(len(q))]
        k = [sum(k[: i + 1]) / (i + 1) for i in range(len(k))]
    w_e, w_r = weights["w_e"][h], weights["w_r"][h]
    rows_e, rows_r, slices = list(w_e), list(w_r), [token[own] for token in tokens]
    e, r = [], []
    for i in range(len(tokens)):
        phi_q, phi_k = (_unit(q[i]), _unit(k[i])) if cosine else (q[i], k[i])
        if num_rows is None:
            e.append(w_e.T @ phi_q)
            r.append(w_r.T @ phi_k)
            continue
        grid = spaced(num_rows, max_len if is_causal else len(tokens))
        seen = [m for m, t in enumerate(grid) if t < len(tokens) and (t <= i or not is_causal)]
        zero = torch.zeros_like(rows_e[0])
        e.append(sum(((slices[grid[m]] @ phi_q) * rows_e[m] for m in seen), zero))
        r.append(sum(((slices[grid[m]] @ phi_k) * rows_r[m] for m in seen), zero))
    empty = w_e.new_zeros(0, w_e.shape[1])
    return (torch.stack(e), torch.stack(r)) if tokens else (empty, empty)


def _objective_parts(e, r, weights, batch, num_heads):
    energy, trace = [torch.zeros((), dtype=weights["w_e"].dtype)] * batch, 0.0
    for h in range(num_heads):
        trace = trace + torch.trace(weights["w_e"][h].T @ weights["w_r"][h]) / num_heads
        big_lambda = torch.diag(weights["sqrt_lambda"][h] ** 2)
        for b in range(batch):
            for e_i, r_i in zip(e[b, h], r[b, h], strict=True):
                energy[b] = energy[b] + (e_i @ big_lambda @ e_i + r_i @ big_lambda @ r_i) / (2 * num_heads)
    return torch.stack(energy), trace


def spaced(count: int, length: int) -> list[int]:
    """``count`` of 0..length - 1, as evenly as whole numbers allow: floor(m (length - 1) / (count - 1))."""
    count = min(count, length)
    return [0] * count if count == 1 else [m * (length - 1) // (count - 1) for m in range(count)]


def _linear(weights: Mapping[str, Tensor], name: str, vector: Tensor) -> Tensor:
    out = weights[f"{name}.weight"] @ vector
    return out + weights[f"{name}.bias"] if f"{name}.bias" in weights else out


def _unit(vector: Tensor) -> Tensor:
    norm = torch.sqrt((vector * vector).sum())
    return vector / norm if norm > 0 else vector * 0.0


def primal_value_attention(phi_q, phi_k, v, w_e, w_r, big_lambda, is_causal=False, by_row_sums=False):
    """One head of primal attention with values as plain loops, in float64.

    phi_q (N, m), phi_k (S, m), v (S, p), w_e and w_r (m, s), big_lambda (s,) -> (N, p).
    """
    outputs = []
    for i in range(len(phi_q)):
        keys = range(i + 1) if is_causal else range(len(phi_k))
        total = torch.zeros(v.size(1), dtype=torch.float64)
        for j in keys:
            weight = sum(
                (w_e[:, direction] @ phi_q[i]) * big_lambda[direction] * (w_r[:, direction] @ phi_k[j])
                for direction in range(len(big_lambda))
            )
            total = total + weight * v[j]
        outputs.append(total / (sum(phi_q[i] @ phi_k[j] for j in keys) if by_row_sums else len(keys)))
    return torch.stack(outputs)
