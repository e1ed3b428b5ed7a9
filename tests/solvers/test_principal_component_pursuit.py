"""Principal Component Pursuit: planted parts come back, and the end is proved optimal by duality."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_attention.errors import InputError

pytest.importorskip("sklearn")
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention import solvers
from kernel_attention.solvers import principal_component_pursuit as pursue


def planted(m: int, n: int, rank: int, fraction: float) -> tuple[Tensor, Tensor]:
    low_rank = torch.randn(m, rank, dtype=torch.float64) @ torch.randn(rank, n, dtype=torch.float64)
    sparse = torch.zeros(m * n, dtype=torch.float64)
    hit = torch.randperm(m * n)[: round(fraction * m * n)]
    sparse[hit] = 10 * torch.randn(len(hit), dtype=torch.float64)
    return low_rank, sparse.view(m, n)


def error(found: Tensor, expected: Tensor) -> float:
    return (torch.linalg.matrix_norm(found - expected) / torch.linalg.matrix_norm(expected)).item()


def objective(low_rank: np.ndarray, sparse: np.ndarray, lam: float) -> float:
    return np.linalg.svd(low_rank, compute_uv=False).sum() + lam * np.abs(sparse).sum()


def douglas_rachford(m: np.ndarray, lam: float, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """An independent way to the same minimum, without multiplier: Douglas-Rachford splitting of the
    objective and the indicator of L + S = M, on the pair (L, S).
    """
    x, y = m / 2, m / 2
    t = 1.0
    for _ in range(steps):
        gap = (m - x - y) / 2
        low_rank, sparse = x + gap, y + gap  # the nearest pair that sums to M
        u, s, v = np.linalg.svd(2 * low_rank - x, full_matrices=False)
        ahead = 2 * sparse - y
        x = x + (u * np.maximum(s - t, 0)) @ v - low_rank
        y = y + np.sign(ahead) * np.maximum(np.abs(ahead) - t * lam, 0) - sparse
    return low_rank, sparse


def test_rank_5_and_5_percent_gross_corruption_of_200_by_200_come_back():
    low_rank, sparse = planted(200, 200, 5, 0.05)
    found = pursue(low_rank + sparse)
    assert found.converged
    assert error(found.low_rank, low_rank) < 1e-5
    assert error(found.sparse, sparse) < 1e-5
    assert torch.linalg.matrix_rank(found.low_rank) == 5
    assert torch.equal(found.sparse != 0, sparse != 0)


@pytest.mark.parametrize("lam", [None, 0.24, 0.4])
def test_the_end_is_certified_by_the_subgradients_of_both_norms(lam):
    # Nothing is planted. Optimal is (L, S) with Y in both subdifferentials: ||Y||_2 <= 1, <Y, L> = ||L||_*,
    # |Y| <= lambda, <Y, S> = lambda ||S||_1.
    matrix = torch.randn(13, 11, dtype=torch.float64) @ torch.diag(torch.linspace(3, 0.1, 11).double())
    found = pursue(matrix, lam, tol=1e-10, max_iter=50_000)
    lam = 13**-0.5 if lam is None else lam
    low_rank, sparse, y = found.low_rank, found.sparse, found.dual
    size = torch.linalg.matrix_norm(matrix).item()
    assert found.converged
    assert torch.linalg.matrix_norm(matrix - low_rank - sparse).item() < 1e-9 * size
    assert torch.linalg.matrix_norm(y, ord=2).item() < 1 + 1e-8
    assert y.abs().max().item() < lam * (1 + 1e-8)
    nuclear = torch.linalg.matrix_norm(low_rank, ord="nuc").item()
    assert (y * low_rank).sum().item() == pytest.approx(nuclear, rel=1e-8)
    assert (y * sparse).sum().item() == pytest.approx(lam * sparse.abs().sum().item(), rel=1e-8)
    assert 0 < nuclear < size * 11**0.5
    assert (sparse != 0).any()


def test_an_independent_method_finds_the_same_minimum():
    matrix = sum(planted(12, 9, 2, 0.08)) + 0.1 * torch.randn(12, 9, dtype=torch.float64)
    lam = 12**-0.5
    found = pursue(matrix, tol=1e-10, max_iter=50_000)
    theirs_low_rank, theirs_sparse = douglas_rachford(matrix.numpy(), lam, 3000)
    ours = objective(found.low_rank.numpy(), found.sparse.numpy(), lam)
    assert ours == pytest.approx(objective(theirs_low_rank, theirs_sparse, lam), rel=1e-8)
    np.testing.assert_allclose(found.low_rank, theirs_low_rank, atol=1e-6 * matrix.abs().max().item())
    np.testing.assert_allclose(found.sparse, theirs_sparse, atol=1e-6 * matrix.abs().max().item())


def test_the_duality_gap_bounds_what_is_left_wherever_the_iteration_ends():
    matrix, lam = sum(planted(20, 30, 3, 0.1)), 30**-0.5
    best = pursue(matrix, tol=1e-10, max_iter=20_000)
    smallest = objective(best.low_rank.numpy(), (matrix - best.low_rank).numpy(), lam)
    assert 0 <= best.duality_gap < 1e-8
    for steps in (2, 5, 20):
        early = pursue(matrix, max_iter=steps)
        assert not early.converged
        assert early.num_iterations == steps
        value = objective(early.low_rank.numpy(), (matrix - early.low_rank).numpy(), lam)
        assert (value - smallest) / value <= early.duality_gap + 1e-9
        assert early.duality_gap > best.duality_gap


@pytest.mark.parametrize("scale", [1e-200, 1e-3, 1e200])
def test_the_solution_scales_with_the_matrix(scale):
    matrix = sum(planted(30, 20, 2, 0.05))
    found, scaled = pursue(matrix), pursue(scale * matrix)
    torch.testing.assert_close(scaled.low_rank / scale, found.low_rank, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled.dual, found.dual, rtol=1e-4, atol=1e-6)
    assert scaled.converged


def test_missing_entries_are_filled_in():
    low_rank, sparse = planted(60, 50, 2, 0.03)
    known = torch.rand(60, 50) < 0.8
    matrix = torch.where(known, low_rank + sparse, torch.nan)
    found = pursue(matrix, mask=known)
    assert error(found.low_rank, low_rank) < 1e-5
    torch.testing.assert_close(found.sparse, sparse * known, atol=1e-5, rtol=0)
    assert 0 <= found.duality_gap < 1e-5
    # What stands at a missing entry is not read, and a mask that keeps all is none.
    assert torch.equal(pursue(matrix.nan_to_num(1e6), mask=known).low_rank, found.low_rank)
    whole = pursue(low_rank + sparse, mask=torch.ones_like(known))
    assert torch.equal(whole.low_rank, pursue(low_rank + sparse).low_rank)
    estimator = solvers.PrincipalComponentPursuit().fit(matrix.numpy())
    np.testing.assert_allclose(estimator.low_rank_, found.low_rank, atol=1e-6)  # of the iteration's tolerance


def test_float32_and_zero():
    low_rank, sparse = planted(60, 50, 2, 0.05)
    found = pursue((low_rank + sparse).float())
    assert found.low_rank.dtype == torch.float32
    assert found.converged
    assert error(found.low_rank.double(), low_rank) < 1e-5
    nothing = pursue(torch.zeros(3, 2))
    assert nothing.converged
    assert not nothing.low_rank.any()


def test_the_estimator_remembers_what_the_function_found_numpy_or_torch():
    matrix = sum(planted(30, 20, 2, 0.05))
    found = pursue(matrix, 0.3, tol=1e-6)
    for X in (matrix.numpy(), matrix):
        estimator = solvers.PrincipalComponentPursuit(0.3, tol=1e-6).fit(X)
        assert type(estimator.low_rank_) is type(X)
        # The same iteration on another buffer: alignment may change the order of a sum, and the last step.
        near = {"rtol": 0, "atol": 1e-5 * matrix.abs().max().item()}
        np.testing.assert_allclose(estimator.low_rank_, found.low_rank, **near)
        np.testing.assert_allclose(estimator.sparse_, found.sparse, **near)
        np.testing.assert_allclose(estimator.dual_, found.dual, rtol=0, atol=1e-4)
        assert abs(estimator.n_iter_ - found.num_iterations) <= 1
        assert estimator.duality_gap_ == pytest.approx(found.duality_gap, abs=1e-5)
    with pytest.warns(ConvergenceWarning, match="max_iter=3 ended the pursuit"):
        solvers.PrincipalComponentPursuit(max_iter=3).fit(matrix)


@parametrize_with_checks([solvers.PrincipalComponentPursuit()])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (torch.ones(3), {}, r"matrix has shape \(3,\)"),
        (torch.ones(0, 3), {}, "not empty"),
        (torch.full((2, 2), torch.nan), {}, "matrix .where it is known. holds NaN"),
        (torch.ones(2, 3), {"mask": torch.ones(3, 2).bool()}, r"mask has shape \(3, 2\)"),
        (torch.ones(2, 3), {"mask": torch.zeros(2, 3).bool()}, "keeps no entry"),
        (torch.ones(2, 3), {"lam": -1.0}, "lam=-1.0 must be a positive number"),
        (torch.ones(2, 3), {"mu": 0.0}, "mu=0.0"),
        (torch.ones(2, 3), {"tol": float("nan")}, "tol=nan"),
        (torch.ones(2, 3), {"max_iter": 0}, "max_iter=0"),
    ],
)
def test_bad_input_is_named(matrix, options, message):
    with pytest.raises(InputError, match=message):
        pursue(matrix, **options)
