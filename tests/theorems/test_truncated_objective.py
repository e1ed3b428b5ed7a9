"""What the KMLSVD objective J is away from the full-rank multilinear SVD, in float64; our own derivation.

For K of order D, any factors U_n with orthonormal columns and S = K x_1 U_1^T .. x_D U_D^T,

    J = (D - 2)/2 (||K||^2 - ||S||^2) + 1/2 sum_n ||(I - U_n U_n^T) B_n P_n||^2,

with B_n = K_(n) projected on the other factors and P_n the projection on the rows of S_(n). The first term is
what the ranks leave out; the second is 0 where every U_n spans an invariant subspace of B_n B_n^T: at full
rank, at order 2's truncated SVD, and at the fixed points of higher-order orthogonal iteration.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import kmlsvd_objective, multilinear_kernel
from reference import multilinear as reference

F64 = torch.float64
TOKENS, FEATURES = (7, 5, 6, 4), 4
RANKS = {
    2: (3, 3),
    3: (2, 3, 2),
    4: (2, 3, 2, 3),
}  # unequal ranks at order 2 would make S_(n) S_(n)^T singular
orders = pytest.mark.parametrize("order", [2, 3, 4])


class Problem:
    """Features Phi_n (N_n, M) of one head, and K = I x_1 Phi_1 .. x_D Phi_D."""

    def __init__(self, order: int) -> None:
        self.order = order
        self.phi = [torch.randn(count, FEATURES, dtype=F64) for count in TOKENS[:order]]
        self.kernel = multilinear_kernel([phi[None, None] for phi in self.phi])[0, 0]

    def core(self, bases: list[Tensor], but: int | None = None) -> Tensor:
        """K x_m U_m^T over all modes, or all but one."""
        core = self.kernel
        for n, basis in enumerate(bases):
            if n != but:
                core = torch.tensordot(core, basis, dims=([n], [0])).movedim(-1, n)
        return core

    def objective(self, bases: list[Tensor]) -> Tensor:
        weights = [(phi.T @ basis)[None] for phi, basis in zip(self.phi, bases, strict=True)]
        grams = [(phi.T @ phi)[None, None] for phi in self.phi]
        return kmlsvd_objective(grams, weights, self.core(bases)[None])

    def lost(self, bases: list[Tensor]) -> Tensor:
        return self.kernel.square().sum() - self.core(bases).square().sum()

    def not_invariant(self, bases: list[Tensor]) -> Tensor:
        """sum_n ||(I - U_n U_n^T) B_n P_n||^2."""
        total = torch.zeros((), dtype=F64)
        for n, basis in enumerate(bases):
            b = self.core(bases, but=n).movedim(n, 0).flatten(1)
            s = basis.T @ b
            total = total + ((b - basis @ s) @ torch.linalg.pinv(s) @ s).square().sum()
        return total


def random_bases(order: int) -> list[Tensor]:
    sizes = zip(TOKENS[:order], RANKS[order], strict=True)
    return [torch.linalg.qr(torch.randn(count, rank, dtype=F64))[0] for count, rank in sizes]


@orders
def test_the_value_of_j_at_any_orthonormal_factors(order):
    problem, bases = Problem(order), random_bases(order)
    lost, rest = problem.lost(bases), problem.not_invariant(bases)
    assert lost > 0.1
    assert rest > 0.1
    torch.testing.assert_close(problem.objective(bases), (order - 2) / 2 * lost + rest / 2)


@orders
def test_the_value_of_j_at_the_truncated_multilinear_svd(order):
    problem = Problem(order)
    _, bases = reference.mlsvd(problem.kernel, RANKS[order])
    lost, rest = problem.lost(bases), problem.not_invariant(bases)
    assert lost > 0.1
    torch.testing.assert_close(problem.objective(bases), (order - 2) / 2 * lost + rest / 2)
    if order == 2:  # singular vectors are invariant, and nothing weighs what is lost: J stays 0
        assert abs(problem.objective(bases).item()) < 1e-10 * problem.kernel.square().sum()
    else:  # the factors of the multilinear SVD are invariant for K_(n), not for its projections
        assert rest > 1e-6


@orders
def test_the_value_of_j_where_one_mode_is_truncated_alone(order):
    # The other factors project on all of their modes' ranges, so U_n is invariant and only the loss is left.
    problem = Problem(order)
    full = [int(torch.linalg.matrix_rank(problem.kernel.movedim(n, 0).flatten(1))) for n in range(order)]
    _, bases = reference.mlsvd(problem.kernel, full)
    bases[0] = bases[0][:, :2]
    lost = problem.lost(bases)
    assert lost > 0.1
    # The other factors span their modes' whole range, so no part of theirs is outside either.
    torch.testing.assert_close(problem.objective(bases), (order - 2) / 2 * lost, rtol=1e-9, atol=1e-9)
