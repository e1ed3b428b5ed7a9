"""Lanczos' decomposition (1958), in float64: what the shifted eigenvalue problem A V = U S, A^T U = V S says.

Sources: the Primal-Attention poster (U^T U = V^T V = I asked for) and theorem 2.1 of the KMLSVD thesis (not
asked for, but claimed of every solution: it is not so, below). No SVD is called where one is to be found.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

F64 = torch.float64
ROWS, COLUMNS, RANK = 7, 5, 3


def matrix() -> Tensor:
    return torch.randn(ROWS, RANK, dtype=F64) @ torch.randn(RANK, COLUMNS, dtype=F64)


def shifted(a: Tensor) -> Tensor:
    """[[0, A], [A^T, 0]]."""
    whole = torch.zeros(ROWS + COLUMNS, ROWS + COLUMNS, dtype=F64)
    whole[:ROWS, ROWS:], whole[ROWS:, :ROWS] = a, a.T
    return whole


def solve(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, S (as a vector), V from the shifted eigenvalue problem: its positive eigenvalues."""
    values, vectors = torch.linalg.eigh(shifted(a))
    kept = vectors[:, -RANK:] * 2**0.5  # an eigenvector's two halves have norm 1 / sqrt(2) each
    return kept[:ROWS], values[-RANK:], kept[ROWS:]


def solves(a: Tensor, u: Tensor, s: Tensor, v: Tensor) -> None:
    torch.testing.assert_close(a @ v, u * s)
    torch.testing.assert_close(a.T @ u, v * s)


def test_the_spectrum_is_plus_and_minus_the_singular_values_and_zeros():
    a = matrix()
    values = torch.linalg.eigvalsh(shifted(a))
    singular = (a.T @ a).trace().sqrt()  # their squares sum to ||A||^2
    torch.testing.assert_close(values, -values.flip(0))
    torch.testing.assert_close(values[-RANK:].norm(), singular)
    torch.testing.assert_close(values[RANK:-RANK], torch.zeros(ROWS + COLUMNS - 2 * RANK, dtype=F64))
    assert (values[-RANK:] > 1e-3).all()


def test_its_positive_part_is_an_orthonormal_decomposition_of_the_matrix():
    a = matrix()
    u, s, v = solve(a)
    solves(a, u, s, v)
    torch.testing.assert_close(u.T @ u, torch.eye(RANK, dtype=F64))
    torch.testing.assert_close(v.T @ v, torch.eye(RANK, dtype=F64))
    torch.testing.assert_close(u * s @ v.T, a)


def test_with_different_singular_values_solutions_are_orthogonal_but_of_any_size():
    a = matrix()
    u, s, v = solve(a)
    size = torch.tensor([2.0, 0.5, 3.0], dtype=F64)
    solves(a, u * size, s, v * size)
    gram = (u * size).T @ (u * size)
    torch.testing.assert_close(gram, gram.diagonal().diag())
    # So the equations do not give A back by themselves: the normalisation has to be asked for.
    assert not torch.allclose((u * size * s) @ (v * size).T, a)
    # One column of U and its partner in V have the same size in every solution (eq. 8 of the supplement).
    torch.testing.assert_close((u * size).norm(dim=0), (v * size).norm(dim=0))


def test_with_equal_singular_values_solutions_need_not_be_orthogonal():
    u, _, v = solve(matrix())
    a = 2.0 * u @ v.T
    mixing = torch.tensor([[1.0, 1.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], dtype=F64)
    solves(a, u @ mixing, torch.full((RANK,), 2.0, dtype=F64), v @ mixing)
    assert abs(((u @ mixing).T @ (u @ mixing))[0, 1]) > 0.5


@pytest.mark.parametrize("kept", [1, 2])
def test_every_subset_of_the_triplets_is_a_solution_that_is_not_the_matrix(kept):
    a = matrix()
    u, s, v = solve(a)
    solves(a, u[:, :kept], s[:kept], v[:, :kept])
    missing = a - u[:, :kept] * s[:kept] @ v[:, :kept].T
    torch.testing.assert_close(missing.norm(), s[kept:].norm())
