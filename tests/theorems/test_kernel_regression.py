"""Softmax attention is the regression of Nadaraya (1964) and Watson (1964) with the exponential kernel."""

from __future__ import annotations

import numpy as np
import torch

import kernel_attention as ka

N, M, P = 7, 11, 5


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)), dtype=torch.float64
    )


def test_softmax_attention_is_the_constant_of_least_weighted_error():
    """The output c of a query minimises sum_j exp(q . k_j / sqrt(p)) |v_j - c|^2, here by least squares."""
    q, k, v = drawn(N, P), drawn(M, P), drawn(M, P + 1)[:, :P]
    heads = ka.functional.softmax_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    for query, output in zip(q, heads, strict=True):
        root = torch.exp(query @ k.T / P**0.5).sqrt()[:, None]
        fitted, *_ = np.linalg.lstsq(root.numpy(), (root * v).numpy(), rcond=None)
        torch.testing.assert_close(output, torch.from_numpy(fitted[0]), rtol=1e-12, atol=1e-12)


def test_with_keys_of_one_length_the_kernel_is_gaussian():
    """exp(q . k / sqrt(p)) is exp(-|q - k|^2 / (2 sqrt(p))) up to a factor of the query: width p^(1/4)."""
    q, v = drawn(N, P), drawn(M, P)
    k = torch.nn.functional.normalize(drawn(M, P + 2)[:, :P], dim=-1) * 2
    weights = torch.exp(-torch.cdist(q, k).square() / (2 * P**0.5))
    expected = weights @ v / weights.sum(dim=-1, keepdim=True)
    heads = ka.functional.softmax_attention(q[None, None], k[None, None], v[None, None])[0, 0]
    torch.testing.assert_close(heads, expected, rtol=1e-12, atol=1e-12)
