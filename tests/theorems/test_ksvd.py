"""The theory of Primal-Attention, numerically, in float64.

Sources: theorem 3.2 (the dual is the SVD of the asymmetric kernel matrix), remark 3.3 (primal scores = dual
scores) and lemma 4.2 (J = 0 at the solution), with the proofs' equations (3), (4) and (6) in section A of the
supplement; for f(X) = identity and for sampled rows f(X). The sizes are different primes; K is built here,
from phi_q and phi_k.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernel_attention import PrimalAttention
from kernel_attention.functional import PrimalScores, ksvd_objective, primal_kernel, primal_scores

HEADS, TOKENS, WIDTH, NEW = 2, 11, 5, 3
# (rows of f(X), rank s): the rank of K is min(rows, p) = 5 or 3; s below it truncates.
SETTINGS = [(None, 5), (None, 3), (7, 5), (7, 2), (3, 3), (3, 1)]
settings = pytest.mark.parametrize(
    "solution", SETTINGS, indirect=True, ids=lambda pair: f"rows_{pair[0]}-s_{pair[1]}"
)


@dataclass
class Solution:
    """The KSVD of one sequence: q, k (1, h, N, p); rows (1, h, M, p) or None; K, U, S, V of every head."""

    q: Tensor
    k: Tensor
    rows: Tensor | None
    kernel: Tensor  # (h, N, N)
    h_e: Tensor  # (h, N, s), left singular vectors
    h_r: Tensor  # (h, N, s), right singular vectors
    sigma: Tensor  # (h, s)
    w_e: Tensor  # (h, M or p, s), from the KKT conditions (3)
    w_r: Tensor

    def transformed(self, vectors: Tensor) -> Tensor:
        """f(X) phi(x) for every x: (1, h, n, p) -> (h, n, M or p)."""
        phi = (vectors / vectors.norm(dim=-1, keepdim=True))[0]
        return phi if self.rows is None else phi @ self.rows[0].mT

    def scores(self, **replaced: Tensor) -> PrimalScores:
        arguments = {"q": self.q, "k": self.k, "w_e": self.w_e, "w_r": self.w_r, **replaced}
        return primal_scores(**arguments, rows=self.rows)

    def objective(self, form: str, **replaced: Tensor) -> Tensor:
        """J with Lambda = Sigma^{-1} in the sum form and N Sigma^{-1} in the mean form."""
        big_lambda = (1 if form == "sum" else TOKENS) / self.sigma
        w_e, w_r = replaced.get("w_e", self.w_e), replaced.get("w_r", self.w_r)
        return ksvd_objective(self.scores(**replaced), w_e, w_r, big_lambda.sqrt(), form=form)


@pytest.fixture
def solution(request) -> Solution:
    num_rows, rank = request.param
    q, k = torch.randn(2, 1, HEADS, TOKENS, WIDTH, dtype=torch.float64)
    rows = None if num_rows is None else torch.randn(1, HEADS, num_rows, WIDTH, dtype=torch.float64)
    empty = torch.empty(0, dtype=torch.float64)
    found = Solution(q, k, rows, *[empty] * 6)
    left, right = found.transformed(q), found.transformed(k)
    found.kernel = torch.stack([
        torch.stack([torch.stack([f_q @ f_k for f_k in right[h]]) for f_q in left[h]]) for h in range(HEADS)
    ])  # fmt: skip
    u, sigma, vh = torch.linalg.svd(found.kernel)
    found.h_e, found.sigma, found.h_r = u[:, :, :rank], sigma[:, :rank], vh.mT[:, :, :rank]
    found.w_r = torch.einsum("hnm,hns->hms", left, found.h_e)  # W_r = sum_i f(X) phi_q(x_i) h_e,i^T
    found.w_e = torch.einsum("hnm,hns->hms", right, found.h_r)  # W_e = sum_j f(X) phi_k(x_j) h_r,j^T
    return found


@settings
def test_the_librarys_kernel_matrix_is_that_of_the_theorem(solution):
    torch.testing.assert_close(primal_kernel(solution.q, solution.k, rows=solution.rows)[0], solution.kernel)


@settings
def test_theorem_3_2_the_dual_variables_are_the_singular_vectors_of_the_layers_kernel(solution):
    solvers = pytest.importorskip("kernel_attention.solvers")
    rank = solution.sigma.size(1)
    for h, kernel in enumerate(primal_kernel(solution.q, solution.k, rows=solution.rows)[0]):
        found = solvers.kernel_svd(kernel, n_components=rank, kernel="precomputed")
        torch.testing.assert_close(found.values, solution.sigma[h])
        sign = (found.left * solution.h_e[h]).sum(0).sign()
        torch.testing.assert_close(found.left * sign, solution.h_e[h])
        torch.testing.assert_close(found.right * sign, solution.h_r[h])
        torch.testing.assert_close(solution.kernel[h] @ found.right, found.left * found.values)
        torch.testing.assert_close(solution.kernel[h].mT @ found.left, found.right * found.values)


@settings
def test_the_layers_kernel_is_asymmetric_and_no_larger_in_rank_than_the_feature_space(solution):
    kernel = primal_kernel(solution.q, solution.k, rows=solution.rows)[0]
    assert not torch.allclose(kernel, kernel.mT)
    dimension = WIDTH if solution.rows is None else min(WIDTH, solution.rows.size(2))
    assert torch.linalg.matrix_rank(kernel).tolist() == [dimension] * HEADS


@settings
def test_kkt_the_scores_are_the_dual_variables_times_sigma(solution):
    # Lambda e_i = h_e,i and Lambda r_j = h_r,j with Lambda = Sigma^{-1}.
    e, r = solution.scores()
    torch.testing.assert_close(e[0], solution.h_e * solution.sigma[:, None])
    torch.testing.assert_close(r[0], solution.h_r * solution.sigma[:, None])


@settings
def test_remark_3_3_primal_scores_equal_dual_scores(solution):
    e, r = solution.scores()
    torch.testing.assert_close(e[0], solution.kernel @ solution.h_r)
    torch.testing.assert_close(r[0], solution.kernel.mT @ solution.h_e)


@settings
def test_remark_3_3_holds_out_of_sample(solution):
    q, k = torch.randn(2, 1, HEADS, NEW, WIDTH, dtype=torch.float64)
    e, r = solution.scores(q=q, k=k)
    against_keys = solution.transformed(q) @ solution.transformed(solution.k).mT  # kappa(x, x_j)
    against_queries = solution.transformed(solution.q) @ solution.transformed(k).mT  # kappa(x_i, x)
    torch.testing.assert_close(e[0], against_keys @ solution.h_r)
    torch.testing.assert_close(r[0], against_queries.mT @ solution.h_e)


@settings
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_lemma_4_2_the_objective_is_zero_at_the_solution_truncated_or_not(solution, form):
    # Both halves of J are of the size of Tr(Sigma), which a wrong scaling of Lambda would leave uncancelled.
    assert solution.sigma.sum(-1).min() > 0.1
    torch.testing.assert_close(solution.objective(form).item(), 0.0, rtol=0, atol=1e-12)


@settings
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_the_solution_is_a_stationary_point_of_the_objective(solution, form):
    w_e, w_r = solution.w_e.clone().requires_grad_(), solution.w_r.clone().requires_grad_()
    gradients = torch.autograd.grad(solution.objective(form, w_e=w_e, w_r=w_r), (w_e, w_r))
    for gradient in gradients:
        torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-12)


@settings
def test_the_lambda_of_one_form_is_not_that_of_the_other(solution):
    swapped = ksvd_objective(
        solution.scores(), solution.w_e, solution.w_r, (1 / solution.sigma).sqrt(), form="mean"
    )
    # The energy of the mean form is N times too small: J = Tr(Sigma) (1/N - 1), averaged over heads.
    expected = solution.sigma.sum(-1).mean() * (1 / TOKENS - 1)
    torch.testing.assert_close(swapped, expected)


@settings
def test_lambda_weighs_squared_scores_as_its_square_root_weighs_scores(solution):
    # sqrt_lambda multiplies e: a parameter twice as large quadruples the energy.
    zero = torch.zeros_like(solution.w_e)
    scores, root = solution.scores(), solution.sigma.sqrt()
    energy = ksvd_objective(scores, zero, zero, root, form="sum")
    by_hand = 0.5 * sum(solution.sigma[h] @ (part[0, h] ** 2).sum(0) for h in range(HEADS) for part in scores)
    torch.testing.assert_close(energy, by_hand / HEADS)
    torch.testing.assert_close(ksvd_objective(scores, zero, zero, 2 * root, form="sum"), 4 * energy)


@settings
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_zero_objective_is_necessary_not_sufficient(solution, form):
    zero = torch.zeros_like(solution.w_e)
    assert solution.objective(form, w_e=zero, w_r=zero).item() == 0.0
    # J is quadratic in (W_e, W_r) jointly: half the solution is another zero, and no set of singular vectors.
    assert abs(solution.objective(form, w_e=solution.w_e / 2, w_r=solution.w_r / 2).item()) < 1e-12
    elsewhere = solution.objective(form, w_e=solution.w_e + 0.1 * torch.randn_like(solution.w_e))
    assert abs(elsewhere.item()) > 1e-4


@pytest.mark.parametrize("form", ["sum", "mean"])
@pytest.mark.parametrize("data_dependent", [True, False])
@pytest.mark.parametrize("padded", [True, False])
def test_a_layer_set_to_the_solution_of_its_own_kernel_has_objective_zero(form, data_dependent, padded):
    rank, length = 3, 13 if padded else TOKENS
    layer = PrimalAttention(
        HEADS * WIDTH,
        HEADS,
        rank=rank,
        eta=0.5,
        data_dependent=data_dependent,
        rank_multiplier=2,
        objective_form=form,
    ).double()
    x = torch.randn(1, length, HEADS * WIDTH, dtype=torch.float64)
    mask = torch.arange(length)[None] < TOKENS if padded else None
    with torch.no_grad():
        left, right = layer.q_proj(x)[0, :TOKENS], layer.k_proj(x)[0, :TOKENS]
        kernel = layer.kernel_matrix(x, attention_mask=mask)[0]
        assert not kernel[:, TOKENS:].any()
        assert not kernel[:, :, TOKENS:].any()
        for h in range(HEADS):
            own = slice(h * WIDTH, (h + 1) * WIDTH)
            phi_q = torch.nn.functional.normalize(left[:, own], dim=-1)
            phi_k = torch.nn.functional.normalize(right[:, own], dim=-1)
            if data_dependent:
                grid = [m * (TOKENS - 1) // (2 * rank - 1) for m in range(2 * rank)]
                phi_q, phi_k = phi_q @ x[0, grid, own].T, phi_k @ x[0, grid, own].T
            torch.testing.assert_close(kernel[h, :TOKENS, :TOKENS], phi_q @ phi_k.T)
            u, sigma, vh = torch.linalg.svd(phi_q @ phi_k.T)
            layer.w_r[h] = phi_q.T @ u[:, :rank]
            layer.w_e[h] = phi_k.T @ vh[:rank].T
            layer.sqrt_lambda[h] = ((1 if form == "sum" else TOKENS) / sigma[:rank]).sqrt()
    layer(x, attention_mask=mask)
    torch.testing.assert_close(layer.objective.item(), 0.0, rtol=0, atol=1e-11)
    layer(torch.randn_like(x), attention_mask=mask)
    assert layer.objective.abs() > 1e-4
