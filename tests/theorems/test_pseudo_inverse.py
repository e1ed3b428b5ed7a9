"""Why ``recovered_coefficients`` takes a pseudo-inverse: the kernel-PCA paper (section 2.2.2) has an inverse.

Theorem 1 of Teo & Nguyen 2024 gives the values V = G (I - 1_N) A, with 1_N the matrix of 1/N. To read A off a
trained V the paper inverts I - 1_N, which has no inverse: it is the projection off the constants.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from kernel_attention.solvers import eigenvalue_ratios, kernel_pca_values, recovered_coefficients

F64 = torch.float64
TOKENS, WIDTH, COMPONENTS = 11, 5, 3


@pytest.fixture
def keys() -> Tensor:
    return torch.randn(TOKENS, WIDTH, dtype=F64)


def normaliser(keys: Tensor) -> Tensor:
    """g(k_j), as a column."""
    return (keys @ keys.T / math.sqrt(WIDTH)).exp().sum(1, keepdim=True)


def values_of(a: Tensor, keys: Tensor) -> Tensor:
    """v_dj = a_dj / g(k_j) - (1/N) sum_j' a_dj' / g(k_j)."""
    return (a - a.mean(0)) / normaliser(keys)


def test_what_is_recovered_is_the_printed_formula_with_the_pseudo_inverse(keys):
    v = torch.randn(TOKENS, COMPONENTS, dtype=F64)
    centring = torch.eye(TOKENS, dtype=F64) - 1 / TOKENS
    assert torch.linalg.matrix_rank(centring) == TOKENS - 1  # so there is no inverse
    expected = torch.linalg.pinv(centring) @ (normaliser(keys) * v)
    torch.testing.assert_close(recovered_coefficients(keys, v), expected)


def test_of_all_coefficients_with_the_same_values_the_eigenvectors_come_back(keys):
    # A constant added to a column of A changes no value: infinitely many A have one V. K~ 1 = 0, so an
    # eigenvector with lambda > 0 sums to 0: the solution of least norm is the right one.
    found = kernel_pca_values(keys, COMPONENTS)
    moved = found.coefficients + torch.tensor([1.0, -5.0, 0.3], dtype=F64)
    torch.testing.assert_close(values_of(found.coefficients, keys), found.values)
    torch.testing.assert_close(values_of(moved, keys), found.values)
    assert not torch.allclose(moved, found.coefficients)
    torch.testing.assert_close(recovered_coefficients(keys, values_of(moved, keys)), found.coefficients)


def test_the_ratio_that_the_paper_checks_is_constant_on_these_and_not_on_others(keys):
    found = kernel_pca_values(keys, COMPONENTS)
    ratios = eigenvalue_ratios(keys, found.values)
    torch.testing.assert_close(ratios.gamma, found.eigenvalues.expand_as(ratios.gamma), rtol=1e-6, atol=0)
    # As good an answer to the inverse, and no eigenvector: K~ takes the constant away, the division does not.
    with_constant = found.coefficients + found.coefficients.abs().mean()
    gamma = ratios.gamma * found.coefficients / with_constant
    assert (gamma.std(0) > 0.1 * found.eigenvalues).all()
    other = eigenvalue_ratios(keys, torch.randn(TOKENS, COMPONENTS, dtype=F64))
    assert (other.relative_spread > 0.1).all()


def test_what_a_layer_has_of_constants_is_lost_to_the_theory(keys):
    # A trained V need not be of the form G (I - 1_N) A: what is not comes back without its part along g^{-1}.
    v = torch.randn(TOKENS, COMPONENTS, dtype=F64)
    missing = v - values_of(recovered_coefficients(keys, v), keys)
    g = normaliser(keys)
    torch.testing.assert_close(missing, (g * v).mean(0) / g)
    assert missing.norm() > 0.1 * v.norm()
