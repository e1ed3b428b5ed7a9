"""Why the inverse in the kernel-PCA paper (section 2.2.2) has to be a pseudo-inverse, in float64.

Theorem 1 of Teo & Nguyen 2024 gives the values V = G (I - 1_N) A, with 1_N the matrix of 1/N. To read A off a
trained V the paper inverts I - 1_N, which has no inverse: it is the projection off the constants.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

F64 = torch.float64
TOKENS, WIDTH, COMPONENTS = 11, 5, 3
CENTRING = torch.eye(TOKENS, dtype=F64) - 1 / TOKENS


class Keys:
    """K~ (N, N), centred; g (N, 1); the eigenvectors A (N, D) of K~ with their N lambda (D,)."""

    def __init__(self) -> None:
        k = torch.randn(TOKENS, WIDTH, dtype=F64)
        similar = (k @ k.T / math.sqrt(WIDTH)).exp()
        self.g = similar.sum(1, keepdim=True)
        self.gram = CENTRING @ (similar / (self.g * self.g.T)) @ CENTRING
        values, vectors = torch.linalg.eigh(self.gram)
        self.values = values[-COMPONENTS:]
        self.a = vectors[:, -COMPONENTS:] / self.values.sqrt()

    def values_of(self, a: Tensor) -> Tensor:
        """v_dj = a_dj / g(k_j) - (1/N) sum_j' a_dj' / g(k_j)."""
        return (a - a.mean(0)) / self.g

    def read(self, v: Tensor) -> Tensor:
        """A^ = (I - 1_N)^+ G^{-1} V."""
        return torch.linalg.pinv(CENTRING) @ (self.g * v)


def test_the_matrix_to_be_inverted_is_a_projection_off_the_constants():
    torch.testing.assert_close(CENTRING @ CENTRING, CENTRING)
    torch.testing.assert_close(CENTRING @ torch.ones(TOKENS, dtype=F64), torch.zeros(TOKENS, dtype=F64))
    assert torch.linalg.matrix_rank(CENTRING) == TOKENS - 1
    # A projection is its own pseudo-inverse, so nothing has to be decomposed.
    torch.testing.assert_close(torch.linalg.pinv(CENTRING), CENTRING)


def test_values_do_not_determine_the_coefficients():
    # A constant added to a column of A changes no value: infinitely many A have one V.
    keys = Keys()
    moved = keys.a + torch.tensor([1.0, -5.0, 0.3], dtype=F64)
    torch.testing.assert_close(keys.values_of(moved), keys.values_of(keys.a))
    assert not torch.allclose(moved, keys.a)


def test_the_pseudo_inverse_picks_the_one_that_eigenvectors_are():
    # K~ 1 = 0, so an eigenvector with lambda > 0 sums to 0: the solution of least norm is the right one.
    keys = Keys()
    torch.testing.assert_close(keys.a.sum(0), torch.zeros(COMPONENTS, dtype=F64), rtol=0, atol=1e-9)
    torch.testing.assert_close(keys.read(keys.values_of(keys.a)), keys.a)
    torch.testing.assert_close(keys.read(keys.values_of(keys.a + 5.0)), keys.a)


def test_the_ratio_that_the_paper_checks_is_constant_on_these_and_not_on_others():
    keys = Keys()
    recovered = keys.read(keys.values_of(keys.a))
    gamma = keys.gram @ recovered / (TOKENS * recovered)
    torch.testing.assert_close(gamma, (keys.values / TOKENS).expand_as(gamma))
    with_constant = keys.a + keys.a.abs().mean()  # as good an answer to the inverse, and no eigenvector
    gamma = keys.gram @ with_constant / (TOKENS * with_constant)
    assert (gamma.std(0) > 0.1 * keys.values / TOKENS).all()


def test_what_a_layer_has_of_constants_is_lost_to_the_theory():
    # A trained V need not be of the form G (I - 1_N) A: what is not comes back without its part along g^{-1}.
    keys = Keys()
    v = torch.randn(TOKENS, COMPONENTS, dtype=F64)
    missing = v - keys.values_of(keys.read(v))
    torch.testing.assert_close(missing, (keys.g * v).mean(0) / keys.g)
    assert missing.norm() > 0.1 * v.norm()


def test_the_solvers_recovery_is_this_one():
    solvers = pytest.importorskip("kernel_attention.solvers")
    k, v = torch.randn(TOKENS, WIDTH, dtype=F64), torch.randn(TOKENS, COMPONENTS, dtype=F64)
    g = (k @ k.T / math.sqrt(WIDTH)).exp().sum(1, keepdim=True)
    torch.testing.assert_close(solvers.recovered_coefficients(k, v), CENTRING @ (g * v))
