"""The theory of multilinear attention, numerically, in float64.

Sources: Verbeek, "3D Primal Attention", theorem 2.2 (the multilinear SVD by the generalised Lanczos
    equations), eq. 2-19 to 2-23
(primal and dual), and what our own derivations say of J where the thesis is silent: truncated SVDs, HOOI
fixed points, order 2. K is built here, entry by entry, and decomposed here.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import (
    PrimalScores,
    core_penalty,
    dual_multilinear_scores,
    kmlsvd_objective,
    ksvd_objective,
    mlsvd_core,
    multilinear_kernel,
    multilinear_scores,
    primal_scores,
)
from kernel_attention.tensors.features.feature_maps import identity
from reference import multilinear as reference
from reference.multilinear import kronecker, unfolded, without

F64 = torch.float64
TOKENS = (7, 5, 6, 4)  # of each mode: the modes may read different sequences
FEATURES = (3, 2, 3, 2)
orders = pytest.mark.parametrize("order", [2, 3, 4])
compatibilities = pytest.mark.parametrize("kind", ["identity", "diagonal", "full"])


class Problem:
    """One head: features Phi_n (N_n, M_n), C, and K = C x_1 Phi_1 .. x_D Phi_D as a dense tensor."""

    def __init__(self, order: int, kind: str) -> None:
        widths = FEATURES[:order] if kind == "full" else (3,) * order
        self.order = order
        self.phi = [torch.randn(n, m, dtype=F64) for n, m in zip(TOKENS, widths, strict=False)]
        dense = torch.zeros(widths, dtype=F64)
        diagonal = (
            torch.ones(widths[0], dtype=F64) if kind == "identity" else torch.randn(widths[0], dtype=F64)
        )
        dense[tuple([torch.arange(widths[0])] * order if kind != "full" else [])] = (
            diagonal if kind != "full" else 0.0
        )
        self.dense = torch.randn(widths, dtype=F64) if kind == "full" else dense
        self.compatibility = {"identity": None, "diagonal": diagonal[None], "full": self.dense[None]}[kind]
        entries = reference.kernel_entries(
            self.phi, {at: self.dense[at] for at in itertools.product(*map(range, widths))}
        )
        self.kernel = torch.stack(list(entries.values())).reshape([len(p) for p in self.phi])

    def weights(self, bases: list[Tensor]) -> list[Tensor]:
        """W_n = Phi_n^T U_n, the primal side of the factors; (1, M_n, R_n)."""
        return [(phi.T @ u)[None] for phi, u in zip(self.phi, bases, strict=True)]

    def scores(self, weights: list[Tensor], core: Tensor) -> list[Tensor]:
        sequences = [phi[None, None] for phi in self.phi]
        found = multilinear_scores(
            sequences, weights, core[None], compatibility=self.compatibility, feature_map=identity
        )
        return [e[0, 0] for e in found]

    def objective(self, weights: list[Tensor], core: Tensor) -> Tensor:
        grams = [(phi.T @ phi)[None, None] for phi in self.phi]
        return kmlsvd_objective(grams, weights, core[None], compatibility=self.compatibility)

    def full_ranks(self) -> list[int]:
        return [int(torch.linalg.matrix_rank(unfolded(self.kernel, n))) for n in range(self.order)]


@orders
@compatibilities
def test_the_scores_are_the_printed_kronecker_form(order, kind):
    problem = Problem(order, kind)
    ranks = (2, 3, 2, 3)[:order]
    w = [torch.randn(phi.size(1), rank, dtype=F64) for phi, rank in zip(problem.phi, ranks, strict=True)]
    s = torch.randn(ranks, dtype=F64)
    for n, e in enumerate(problem.scores([weight[None] for weight in w], s)):
        assert e.shape == (TOKENS[n], ranks[n])
        printed = problem.phi[n] @ unfolded(problem.dense, n) @ kronecker(without(w, n)) @ unfolded(s, n).T
        torch.testing.assert_close(e, printed)


@orders
@compatibilities
def test_the_librarys_kernel_tensor_is_that_of_the_theorem(order, kind):
    problem = Problem(order, kind)
    found = multilinear_kernel([phi[None, None] for phi in problem.phi], problem.compatibility)
    torch.testing.assert_close(found[0, 0], problem.kernel)


@orders
@compatibilities
def test_theorem_2_2_and_the_primal_scores_equal_the_dual_scores_at_full_rank(order, kind):
    problem = Problem(order, kind)
    core, u = reference.mlsvd(problem.kernel, problem.full_ranks())
    for n, e in enumerate(problem.scores(problem.weights(u), core)):
        s_n, k_n = unfolded(core, n), unfolded(problem.kernel, n)
        torch.testing.assert_close(u[n] @ s_n, k_n @ kronecker(without(u, n)))
        gram = s_n @ s_n.T
        torch.testing.assert_close(gram, gram.diagonal().diag())
        torch.testing.assert_close(e, k_n @ kronecker(without(u, n)) @ s_n.T)
        torch.testing.assert_close(e, u[n] @ gram)


@orders
@compatibilities
def test_the_objective_is_zero_at_the_full_rank_multilinear_svd(order, kind):
    problem = Problem(order, kind)
    core, u = reference.mlsvd(problem.kernel, problem.full_ranks())
    size = problem.kernel.square().sum().item()
    assert abs(problem.objective(problem.weights(u), core).item()) < 1e-12 * size
    # All three terms are of the size of ||K||^2: each has to be right for them to cancel.
    assert abs(problem.objective(problem.weights(u), 1.1 * core).item()) > 1e-2 * size
    first, *rest = problem.weights(u)
    assert abs(problem.objective([1.3 * first, *rest], core).item()) > 1e-2 * size


def test_j_alone_is_unbounded_below():
    # Its first term does not notice the size of S, its second is linear in it, its third has no S: the
    # thesis's eta_1 J falls without end along S, while J^2 has a floor.
    problem = Problem(3, "identity")
    core, u = reference.mlsvd(problem.kernel, problem.full_ranks())
    values = [problem.objective(problem.weights(u), size * core) for size in (1.0, 10.0, 100.0)]
    norm = core.square().sum()
    torch.testing.assert_close(
        torch.stack(values), torch.stack([0 * norm, -18 * norm, -198 * norm]), atol=1e-9, rtol=1e-9
    )


def test_zero_objective_is_necessary_not_sufficient():
    problem = Problem(2, "identity")
    core, u = reference.mlsvd(problem.kernel, problem.full_ranks())
    weights = [0 * w for w in problem.weights(u)]
    assert problem.objective(weights, core).item() == 0.0


def test_order_2_with_a_diagonal_core_is_primal_attention_times_the_core():
    # E_1 = e S and E_2 = r S for equal weights; J is the KSVD's objective under W_KSVD = W S^(1/2), Lambda =
    # S^(-1).
    heads, tokens, width, rank = 2, 7, 5, 3
    q, k = torch.randn(2, 1, heads, tokens, width, dtype=F64)
    w_r, w_e = torch.randn(
        2, heads, width, rank, dtype=F64
    )  # W_1 belongs to the keys' scores, W_2 to the queries'
    s = torch.rand(heads, rank, dtype=F64) + 0.5
    e_1, e_2 = multilinear_scores([q, k], [w_r, w_e], s.diag_embed(), feature_map=identity)
    e, r = primal_scores(q, k, w_e, w_r, feature_map=identity)
    torch.testing.assert_close(e_1, e * s[:, None])
    torch.testing.assert_close(e_2, r * s[:, None])
    root = s.sqrt()[:, None]
    ksvd = ksvd_objective(PrimalScores(e * root, r * root), w_e * root, w_r * root, s.rsqrt(), form="sum")
    grams = [phi.mT @ phi for phi in (q, k)]
    torch.testing.assert_close(kmlsvd_objective(grams, [w_r, w_e], s.diag_embed()), ksvd)
    mean = ksvd_objective(PrimalScores(e * root, r * root), w_e * root, w_r * root, s.rsqrt(), form="mean")
    torch.testing.assert_close(kmlsvd_objective(grams, [w_r, w_e], s.diag_embed(), num_tokens=tokens), mean)


@pytest.mark.parametrize("order", [2, 3])
def test_the_dual_scores_are_those_of_eq_2_23(order):
    # K_(n) (U (x) U) S_(n)^T in general, U_n S_(n) S_(n)^T at full rank only.
    tokens, p = 4, 3
    sequences = [torch.randn(1, 1, tokens, p, dtype=F64) for _ in range(order)]
    kernel, _ = reference.cubemax([list(sequence[0, 0]) for sequence in sequences])
    for rank in (2, tokens):
        core, u = reference.mlsvd(kernel, [rank] * order)
        for n, e in enumerate(dual_multilinear_scores(sequences, rank)):
            s_n = unfolded(core, n)
            torch.testing.assert_close(e[0, 0], unfolded(kernel, n) @ kronecker(without(u, n)) @ s_n.T)
            if rank == tokens:
                torch.testing.assert_close(e[0, 0], u[n] @ s_n @ s_n.T)


@orders
def test_the_core_of_a_core_is_all_orthogonal_and_keeps_its_norm(order):
    cores = torch.randn(2, *(3, 3, 4, 2)[:order], dtype=F64)
    result = mlsvd_core(cores)
    torch.testing.assert_close(result.flatten(1).norm(dim=1), cores.flatten(1).norm(dim=1))
    assert core_penalty(result) < 1e-20 * cores.square().sum() ** 2
    for h in range(2):
        torch.testing.assert_close(result[h], reference.mlsvd_core(cores[h]))
        for n in range(order):
            energies = (result[h].movedim(n, 0).flatten(1) ** 2).sum(1)
            assert (energies.diff() <= 1e-12).all()  # the mode's singular values fall
    torch.testing.assert_close(mlsvd_core(result).abs(), result.abs())
