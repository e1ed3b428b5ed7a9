"""Convolution along a sequence or over a token grid; the channels share a kernel or have one each."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor


def convolve_sequence(x: Tensor, weight: Tensor, *, is_causal: bool = False) -> Tensor:
    """y_i = sum_j weight_j x_{i - front + j}, where x is zero outside: (B, N, d) -> (B, N, d).

    Args:
        x: tokens.
        weight: (s,) shared by the channels, or (d, s).
        is_causal: front = s - 1, so that y_i reads x_0..x_i; otherwise front = s // 2: a kernel of even
            length has its extra element in front.
    """
    size = weight.size(-1)
    front = size - 1 if is_causal else size // 2
    padded = torch.nn.functional.pad(x.contiguous(), (0, 0, front, size - 1 - front))
    # A sum of shifts keeps the layout of the tokens; torch's own convolution wants the channels first.
    length = x.size(1)
    return _sum([padded[:, j : j + length] * weight[..., j] for j in range(size)]).to(x.dtype)


def convolve_grid(x: Tensor, weight: Tensor) -> Tensor:
    """The same over a grid of tokens: x (B, H, W, d), weight (s, s) or (d, s, s) -> (B, H, W, d)."""
    size = weight.size(-1)
    front, back = size // 2, size - 1 - size // 2
    padded = torch.nn.functional.pad(x.contiguous(), (0, 0, front, back, front, back))
    height, width = x.size(1), x.size(2)
    shifts = itertools.product(range(size), repeat=2)
    return _sum([padded[:, i : i + height, j : j + width] * weight[..., i, j] for i, j in shifts]).to(x.dtype)


def _sum(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total
