"""The linear SVD as a primal problem with a compatibility matrix C (KMLSVD thesis, equations 2-8 to 2-10).

Its features are the rows and the columns of X. So its kernel is X C X for every C, and X itself where C is a
generalised inverse of X (X C X = X). What follows for the choice of C is ours.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from kernel_attention.solvers import KernelSVD

F64 = torch.float64
ROWS, COLUMNS, RANK = 7, 5, 3


def matrix() -> Tensor:
    return torch.randn(ROWS, RANK, dtype=F64) @ torch.randn(RANK, COLUMNS, dtype=F64)


def pseudo_inverse(x: Tensor) -> Tensor:
    return torch.linalg.pinv(x, rtol=1e-10)


def block_inverse(x: Tensor) -> Tensor:
    """The inverse of a block of R rows and columns, at the transposed place, and zeros: no SVD is needed."""
    c = torch.zeros(x.shape[1], x.shape[0], dtype=F64)
    c[:RANK, :RANK] = torch.linalg.inv(x[:RANK, :RANK])
    return c


def another_inverse(x: Tensor) -> Tensor:
    """X^+ + Y - X^+ X Y X X^+, which is every solution of X C X = X as Y varies."""
    inverse, y = pseudo_inverse(x), torch.randn(x.shape[1], x.shape[0], dtype=F64)
    return inverse + y - inverse @ x @ y @ x @ inverse


generalised_inverses = pytest.mark.parametrize("inverse", [pseudo_inverse, block_inverse, another_inverse])


def primal(x: Tensor, c: Tensor, rank: int = RANK) -> KernelSVD:
    """The solver of the primal problem with the rows of X as one sample and its columns as the other."""
    return KernelSVD(rank, solver="primal", compatibility=c).fit(x, x.T)


def objective(x: Tensor, c: Tensor, w_1: Tensor, w_2: Tensor, s: Tensor) -> Tensor:
    """Equation 2-8 with the constraints of 2-9 put in; s is the diagonal of S."""
    e_1, e_2 = x @ c @ w_2, x.T @ c.T @ w_1
    return 0.5 * (e_1.square() / s).sum() + 0.5 * (e_2.square() / s).sum() - torch.trace(w_2.T @ c.T @ w_1)


@generalised_inverses
def test_with_a_generalised_inverse_the_dual_is_the_svd_of_x(inverse):
    x = matrix()
    c = inverse(x)
    torch.testing.assert_close(x @ c @ x, x)
    found = primal(x, c)
    u_1, u_2, s = found.left_singular_vectors_, found.right_singular_vectors_, found.singular_values_
    assert u_1.shape == (ROWS, RANK)
    assert u_2.shape == (COLUMNS, RANK)  # and so is E_2, where 2-8 prints N x R
    torch.testing.assert_close(s, torch.linalg.svdvals(x)[:RANK])
    torch.testing.assert_close(x @ u_2, u_1 * s)
    torch.testing.assert_close(x.T @ u_1, u_2 * s)
    torch.testing.assert_close(u_1 * s @ u_2.T, x)


@generalised_inverses
@pytest.mark.parametrize("rank", [1, RANK])
def test_the_singular_directions_are_stationary_in_the_primal_whose_value_there_is_zero(inverse, rank):
    x = matrix()
    c, (u, sigma, vh) = inverse(x), torch.linalg.svd(x, full_matrices=False)
    s = sigma[:rank]
    w_1, w_2 = (x.T @ u[:, :rank]).requires_grad_(), (x @ vh[:rank].T).requires_grad_()
    value = objective(x, c, w_1, w_2, s)
    value.backward()
    size = c.norm() * x.norm() * s.sum()
    assert abs(value) < 1e-12 * size
    assert w_1.grad.norm() < 1e-12 * size
    assert w_2.grad.norm() < 1e-12 * size
    other = objective(x, c, 1.1 * w_1, w_2, s)  # not zero of itself
    torch.testing.assert_close(other, 0.005 * s.sum())


def test_for_any_other_c_the_dual_is_the_svd_of_x_c_x():
    x, c = matrix(), torch.randn(COLUMNS, ROWS, dtype=F64)
    s = primal(x, c).singular_values_
    torch.testing.assert_close(s, torch.linalg.svdvals(x @ c @ x)[:RANK])
    assert not torch.allclose(s, torch.linalg.svdvals(x)[:RANK])
    square = torch.randn(ROWS, ROWS, dtype=F64)
    s = primal(square, torch.eye(ROWS, dtype=F64), ROWS).singular_values_
    torch.testing.assert_close(s, torch.linalg.svdvals(square @ square))  # C = I gives the SVD of X^2


def test_only_an_invertible_x_has_one_c():
    x = matrix()
    assert (another_inverse(x) - pseudo_inverse(x)).norm() > 0.1
    square = torch.randn(ROWS, ROWS, dtype=F64)
    torch.testing.assert_close(another_inverse(square), torch.linalg.inv(square), rtol=1e-6, atol=1e-6)


@generalised_inverses
def test_new_rows_in_the_row_space_of_x_have_scores_that_no_c_changes(inverse):
    x = matrix()
    found = primal(x, inverse(x))
    inside = torch.randn(4, ROWS, dtype=F64) @ x
    e, _ = found.transform(inside, x.T)
    torch.testing.assert_close(e, inside @ found.right_singular_vectors_)


def test_off_the_row_space_the_scores_are_those_of_c_and_the_pseudo_inverse_ignores_that_part():
    x = matrix()
    outside = torch.randn(4, COLUMNS, dtype=F64)
    outside = outside - outside @ pseudo_inverse(x) @ x
    assert outside.norm() > 0.1
    e, _ = primal(x, pseudo_inverse(x)).transform(outside, x.T)
    torch.testing.assert_close(e, torch.zeros_like(e))
    e, _ = primal(x, another_inverse(x)).transform(outside, x.T)
    assert e.norm() > 0.1
