"""What an attention does in the place of the thresholding of Principal Component Pursuit, in float64.

Source: section 3.2 and algorithm 1 of Teo & Nguyen 2024. With S and Y fixed, the Lagrangian of the pursuit
is, but for a constant, f(L) = ||L||_* + mu / 2 ||L - M||^2 with M = K - S + Y / mu. Prime sizes.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import principal_attention_pursuit, softmax_attention

F64 = torch.float64
TOKENS, WIDTH = 13, 7
NOTHING_EXCEEDS = 1e9  # a lambda with which S stays 0


def objective(low_rank: Tensor, target: Tensor, mu: float) -> float:
    """f(L)."""
    distance = torch.linalg.matrix_norm(low_rank - target).item()
    return torch.linalg.matrix_norm(low_rank, ord="nuc").item() + mu / 2 * distance**2


def thresholded(x: Tensor, threshold: float) -> Tensor:
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    return (left * (values - threshold).clamp_min(0)) @ right


def step_size(keys: Tensor) -> float:
    """mu of definition 1."""
    return 1 / (4 * keys.abs().mean().item())


def first_step(keys: Tensor, values: Tensor) -> Tensor:
    """L of the first step, in which S = Y = 0 and M = T = K."""
    found = principal_attention_pursuit(
        keys[None, None], values[None, None], iterations=1, lam=NOTHING_EXCEEDS, convention="paper"
    )
    assert not found.sparse.any()
    torch.testing.assert_close(found.cleaned[0, 0], keys)
    return found.low_rank[0, 0]


def test_the_minimum_for_fixed_s_and_y_has_the_sign_plus_and_the_threshold_one_over_mu():
    keys, dual = torch.randn(2, TOKENS, WIDTH, dtype=F64)
    mu = step_size(keys)
    target = keys + dual / mu
    least = thresholded(target, 1 / mu)
    # Optimal: mu (M - L) is a subgradient of the nuclear norm at L.
    subgradient = mu * (target - least)
    assert torch.linalg.matrix_norm(subgradient, ord=2).item() <= 1 + 1e-12
    nuclear = torch.linalg.matrix_norm(least, ord="nuc").item()
    assert (subgradient * least).sum().item() == pytest.approx(nuclear, rel=1e-12)
    printed = thresholded(keys - dual / mu, mu)  # section 3.2 and appendix D
    assert objective(printed, target, mu) > 1.1 * objective(least, target, mu)


@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_with_values_of_one_of_the_two_signs_attention_leads_away_from_the_minimum(size):
    keys, values = size * torch.randn(2, TOKENS, WIDTH, dtype=F64)
    mu = step_size(keys)
    ahead, back = first_step(keys, values), first_step(keys, -values)
    torch.testing.assert_close(back, -ahead)
    start = objective(torch.zeros_like(keys), keys, mu)
    found = [objective(each, keys, mu) for each in (ahead, back)]
    nuclear = torch.linalg.matrix_norm(ahead, ord="nuc").item()
    assert sum(found) == pytest.approx(2 * start + 2 * nuclear + mu * ahead.square().sum().item(), rel=1e-12)
    assert max(found) > start > objective(thresholded(keys, 1 / mu), keys, mu)


@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_with_small_keys_for_values_it_leads_there_where_their_mean_is_large(offset):
    keys = 1e-5 * (torch.randn(TOKENS, WIDTH, dtype=F64) + offset)
    mu, mean = step_size(keys), torch.linalg.vector_norm(keys.mean(0)).item()
    gained = objective(torch.zeros_like(keys), keys, mu) - objective(first_step(keys, keys), keys, mu)
    expected = mu * TOKENS * mean**2 / 2 - math.sqrt(TOKENS) * mean  # softmax is the mean of the keys
    assert gained == pytest.approx(expected, rel=1e-6)
    assert (gained > 0) == (mu * math.sqrt(TOKENS) * mean > 2) == (offset > 0)


def test_attention_of_the_keys_can_come_near_the_minimum_and_does_not_reach_it():
    keys = 0.3 * torch.randn(61, 3, dtype=F64) @ torch.randn(3, 31, dtype=F64) / math.sqrt(3)
    mu = step_size(keys)
    start, least = (objective(each, keys, mu) for each in (torch.zeros_like(keys), thresholded(keys, 1 / mu)))
    attended = softmax_attention(*(keys[None, None],) * 3)[0, 0]
    left = (objective(attended, keys, mu) - least) / (start - least)
    assert 0.01 < left < 0.9
