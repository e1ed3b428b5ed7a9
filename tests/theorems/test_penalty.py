"""What the training penalty J^2 of Primal-Attention does and does not guarantee, in float64.

Lemma 4.2: J = 0 at the kernel SVD. Not the converse: J is one number, a quadratic form in the weights that
takes both signs, and its zeros are a cone through the origin that fills all but one dimension.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import ksvd_objective, primal_scores

F64 = torch.float64
TOKENS, WIDTH, RANK = 31, 7, 3


class Problem:
    """One head and one sequence with fixed queries and keys; phi (N, p) of both, K and its SVD."""

    def __init__(self) -> None:
        spread = torch.linspace(1.0, 0.2, WIDTH, dtype=F64)
        self.q, self.k = (torch.randn(1, 1, TOKENS, WIDTH, dtype=F64) * spread for _ in range(2))
        self.phi_q, self.phi_k = (x[0, 0] / x[0, 0].norm(dim=-1, keepdim=True) for x in (self.q, self.k))
        self.u, self.sigma, vh = torch.linalg.svd(self.phi_q @ self.phi_k.T)
        self.v = vh.T

    def scores(self, w_e: Tensor, w_r: Tensor) -> tuple[Tensor, Tensor]:
        return primal_scores(self.q, self.k, w_e[None], w_r[None])

    def objective(self, w_e: Tensor, w_r: Tensor, big_lambda: Tensor) -> Tensor:
        arguments = (w_e[None], w_r[None], big_lambda.sqrt()[None])
        return ksvd_objective(self.scores(w_e, w_r), *arguments, form="sum")

    def angle(self, w_e: Tensor) -> float:
        """Largest angle of the scores' span with the leading left singular vectors, in degrees."""
        scores = torch.linalg.qr((self.phi_q @ w_e).detach())[0]
        cosine = torch.linalg.svdvals(scores.T @ self.u[:, :RANK])[-1]
        return torch.rad2deg(cosine.clamp_max(1.0).arccos()).item()

    def solution(self) -> tuple[Tensor, Tensor, Tensor]:
        w_e, w_r = self.phi_k.T @ self.v[:, :RANK], self.phi_q.T @ self.u[:, :RANK]
        return w_e, w_r, 1 / self.sigma[:RANK]


def random_pair() -> tuple[Tensor, Tensor]:
    """Random directions with a positive trace in each: W_r is W_e and some noise."""
    w_e = torch.randn(WIDTH, RANK, dtype=F64)
    return w_e, w_e + 0.1 * torch.randn(WIDTH, RANK, dtype=F64)


def test_whatever_the_directions_a_lambda_makes_j_zero():
    problem, (w_e, w_r) = Problem(), random_pair()
    e, r = (score[0, 0] for score in problem.scores(w_e, w_r))
    big_lambda = 2 * (w_e * w_r).sum(0) / (e.square().sum(0) + r.square().sum(0))
    assert (big_lambda > 0).all()
    assert abs(problem.objective(w_e, w_r, big_lambda).item()) < 1e-12
    assert abs(problem.objective(w_e, w_r, 2 * big_lambda).item()) > 1.0
    assert problem.angle(w_e) > 10.0


def test_whatever_lambda_a_size_of_one_weight_makes_j_zero():
    # J(W_e, a W_r) is a parabola in a; it has roots where the trace outweighs the scores.
    problem, (w_e, w_r) = Problem(), random_pair()
    big_lambda = 0.01 / problem.sigma[:RANK]
    zero = torch.zeros_like(w_e)
    constant, square = problem.objective(w_e, zero, big_lambda), problem.objective(zero, w_r, big_lambda)
    trace = (w_e * w_r).sum()
    root = (trace - (trace**2 - 4 * square * constant).sqrt()) / (2 * square)
    assert abs(problem.objective(w_e, root * w_r, big_lambda).item()) < 1e-10
    assert abs(problem.objective(w_e, 2 * root * w_r, big_lambda).item()) > 0.05
    assert problem.angle(w_e) > 10.0


def test_the_zeros_are_a_cone():
    problem = Problem()
    w_e, w_r, big_lambda = problem.solution()
    other = random_pair()
    for size in (0.0, 0.3, 7.0):
        assert abs(problem.objective(size * w_e, size * w_r, big_lambda).item()) < 1e-11 * (1 + size**2)
        value = problem.objective(size * other[0], size * other[1], big_lambda)
        torch.testing.assert_close(value, size**2 * problem.objective(*other, big_lambda))


def test_j_takes_both_signs_so_its_zero_is_no_minimum_and_the_square_is_needed():
    problem = Problem()
    w_e, w_r, big_lambda = problem.solution()
    assert problem.objective(w_e, -w_r, big_lambda) > 0.1
    # Along W_e = t W_r' with little in the scores the trace wins: J has no lower bound.
    small = 1e-3 * big_lambda
    assert problem.objective(10 * w_e, 10 * w_r, small) < -10.0


def test_a_vanishing_gradient_of_j_is_what_the_kernel_svd_asks_for():
    # Stationary in W for fixed Lambda: W_r = phi_q^T E Lambda, W_e = phi_k^T R Lambda. H_e = E Lambda and
    # H_r = R Lambda then satisfy the singular value equations; J = 0 follows, not the other way round.
    problem = Problem()
    w_e, w_r, big_lambda = problem.solution()
    w_e.requires_grad_()
    w_r.requires_grad_()
    slopes = torch.autograd.grad(problem.objective(w_e, w_r, big_lambda), (w_e, w_r))
    assert max(slope.abs().max() for slope in slopes) < 1e-12
    other = [w.requires_grad_() for w in random_pair()]
    e, r = (score[0, 0] for score in problem.scores(*other))
    tuned = (2 * (other[0] * other[1]).sum(0) / (e.square().sum(0) + r.square().sum(0))).detach()
    slopes = torch.autograd.grad(problem.objective(*other, tuned), other)
    assert abs(problem.objective(*other, tuned).item()) < 1e-12
    assert min(slope.norm() for slope in slopes) > 0.1


@pytest.mark.parametrize("direction", range(WIDTH))
def test_stationary_weights_exist_for_inverse_singular_values_only_and_are_singular_directions(direction):
    # For one direction J is w^T M w / 2 with M = [[lambda C_q, -I], [-I, lambda C_k]].
    problem, one = Problem(), torch.eye(WIDTH, dtype=F64)
    grams = problem.phi_q.T @ problem.phi_q, problem.phi_k.T @ problem.phi_k

    def hessian(big_lambda: Tensor) -> Tensor:
        return torch.cat([
            torch.cat([big_lambda * grams[0], -one], dim=1),
            torch.cat([-one, big_lambda * grams[1]], dim=1),
        ])  # fmt: skip

    sigma = problem.sigma[direction]
    values, vectors = torch.linalg.eigh(hessian(1 / sigma))
    null = values.abs().argmin()
    assert values[null].abs() < 1e-10 * values.abs().max()
    assert (values.abs() < 1e-6).sum() == 1
    h_e, h_r = problem.phi_q @ vectors[:WIDTH, null] / sigma, problem.phi_k @ vectors[WIDTH:, null] / sigma
    kernel = problem.phi_q @ problem.phi_k.T
    torch.testing.assert_close(kernel @ h_r, h_e * sigma, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(kernel.T @ h_e, h_r * sigma, rtol=1e-6, atol=1e-8)
    assert h_e.norm() > 1e-3
    between = (problem.sigma[direction] + problem.sigma[direction + 1]) / 2  # no singular value: only W = 0
    assert torch.linalg.eigvalsh(hessian(1 / between)).abs().min() > 1e-6


def test_j_squared_stops_pulling_once_j_is_zero():
    # The gradient of J^2 is 2 J dJ: at any zero of J, singular directions or not, nothing moves any more.
    problem, (w_e, w_r) = Problem(), random_pair()
    e, r = (score[0, 0] for score in problem.scores(w_e, w_r))
    big_lambda = 2 * (w_e * w_r).sum(0) / (e.square().sum(0) + r.square().sum(0))
    w_e.requires_grad_()
    (slope,) = torch.autograd.grad(problem.objective(w_e, w_r, big_lambda) ** 2, w_e)
    assert slope.abs().max() < 1e-10


def test_minimising_j_squared_alone_reaches_zero_and_not_the_singular_directions():
    torch.manual_seed(0)
    problem = Problem()
    weights = [torch.nn.init.orthogonal_(torch.empty(WIDTH, RANK, dtype=F64)) for _ in range(2)]
    root = torch.rand(RANK, dtype=F64)
    parameters = [value.requires_grad_() for value in (*weights, root)]
    before = problem.angle(weights[0])
    optimizer = torch.optim.Adam(parameters, lr=1e-2)
    for _ in range(400):
        optimizer.zero_grad()
        loss = problem.objective(*weights, root**2) ** 2
        loss.backward()
        optimizer.step()
    assert loss.item() < 1e-8 * problem.sigma[:RANK].sum() ** 2
    after = problem.angle(weights[0])
    assert after > 10.0
    assert after > 0.5 * before
    # The same weights at the kernel SVD, for comparison: J = 0 and angle 0.
    w_e, w_r, big_lambda = problem.solution()
    assert abs(problem.objective(w_e, w_r, big_lambda).item()) < 1e-12
    assert problem.angle(w_e) < 1e-4
