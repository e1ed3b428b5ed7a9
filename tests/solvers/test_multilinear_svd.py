"""The multilinear SVD against tensorly's and numpy's, and KMLSVD primal against dual."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from kernel_attention.errors import InputError

pytest.importorskip("sklearn")
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention import solvers
from kernel_attention.functional import core_penalty, cubemax_kernel, kmlsvd_objective, multilinear_kernel
from kernel_attention.solvers import multilinear_svd

F64 = torch.float64
SIZES = (7, 5, 6, 4)
orders = pytest.mark.parametrize("order", [2, 3, 4])
methods = pytest.mark.parametrize("method", ["hosvd", "hooi"])
compatibilities = pytest.mark.parametrize("kind", ["identity", "diagonal", "full"])


def random_tensor(order: int) -> Tensor:
    return torch.randn(SIZES[:order], dtype=F64)


def product(core: Tensor, factors: list[Tensor]) -> Tensor:
    for n, factor in enumerate(factors):
        core = torch.tensordot(core, factor, dims=([n], [1])).movedim(-1, n)
    return core


def unfolded(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).flatten(1)


def gram(core: Tensor, mode: int) -> Tensor:
    return unfolded(core, mode) @ unfolded(core, mode).T


def lost(tensor: Tensor, core: Tensor) -> Tensor:
    return tensor.square().sum() - core.square().sum()


def features(order: int, kind: str) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """Phi_n, C as the functions take it, and K entry by entry."""
    widths = (3, 2, 4, 2)[:order] if kind == "full" else (3,) * order
    phi = [torch.randn(n, m, dtype=F64) for n, m in zip(SIZES, widths, strict=False)]
    given = {"identity": None, "diagonal": torch.randn(3, dtype=F64), "full": torch.randn(widths, dtype=F64)}
    compatibility, dense = given[kind], given["full"]
    if kind != "full":
        dense = torch.zeros(widths, dtype=F64)
        dense[(torch.arange(3),) * order] = 1.0 if compatibility is None else compatibility
    return phi, compatibility, product(dense, phi)


@orders
def test_hosvd_agrees_with_tensorlys_up_to_signs(order):
    tensorly = pytest.importorskip("tensorly")
    from tensorly.decomposition import tucker

    tensor = random_tensor(order)
    for ranks in ([5, 5] if order == 2 else list(SIZES[:order]), [3, 2, 3, 2][:order]):
        # No iteration: tensorly's start is the HOSVD.
        _, theirs = tucker(tensorly.tensor(tensor.numpy()), rank=ranks, init="svd", n_iter_max=0, tol=None)
        found = multilinear_svd(tensor, ranks)
        signs = []
        for u, v in zip(found.factors, theirs, strict=True):
            sign = np.sign((u.numpy() * v).sum(0))
            np.testing.assert_allclose(u.numpy() * sign, v, rtol=1e-8, atol=1e-10)
            signs.append(torch.from_numpy(sign).diag())
        expected = product(found.core, signs).numpy()
        projected = tensorly.tenalg.multi_mode_dot(tensor.numpy(), theirs, transpose=True)
        np.testing.assert_allclose(expected, projected, rtol=1e-8, atol=1e-9)


@methods
def test_order_2_is_numpys_svd(method):
    matrix = random_tensor(2)
    for rank in (5, 3):
        found = multilinear_svd(matrix, rank, method=method)
        u, s, vt = np.linalg.svd(matrix.numpy(), full_matrices=False)
        np.testing.assert_allclose(found.factors[0].abs(), np.abs(u[:, :rank]), rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found.factors[1].abs(), np.abs(vt[:rank].T), rtol=1e-7, atol=1e-9)
        np.testing.assert_allclose(found.core.abs(), np.diag(s[:rank]), atol=1e-9)
        for mode, size in enumerate(SIZES[:2]):
            expected = np.pad(s, (0, size - 5))
            np.testing.assert_allclose(found.singular_values[mode], expected, rtol=1e-12)
        best = (u[:, :rank] * s[:rank]) @ vt[:rank]
        np.testing.assert_allclose(product(found.core, found.factors), best, atol=1e-9)


@orders
@methods
def test_at_full_rank_it_is_exact_and_its_core_all_orthogonal(order, method):
    tensor = random_tensor(order)
    found = multilinear_svd(tensor, method=method)
    torch.testing.assert_close(product(found.core, found.factors), tensor)
    for n, u in enumerate(found.factors):
        torch.testing.assert_close(u.T @ u, torch.eye(SIZES[n], dtype=F64))
        singular = found.singular_values[n]
        torch.testing.assert_close(gram(found.core, n), singular.square().diag(), atol=1e-9, rtol=1e-9)
        assert (singular.diff() <= 0).all()
        assert (u.gather(0, u.abs().argmax(0, keepdim=True)) > 0).all()


@pytest.mark.parametrize("order", [3, 4])
def test_hooi_is_stationary_all_orthogonal_and_no_worse_than_the_truncated_hosvd(order):
    tensor, ranks = random_tensor(order), [3, 2, 3, 2][:order]
    truncated, found = multilinear_svd(tensor, ranks), multilinear_svd(tensor, ranks, method="hooi")
    assert found.converged
    assert lost(tensor, found.core) < lost(tensor, truncated.core) - 1e-6
    for n, u in enumerate(found.factors):
        others = [torch.eye(SIZES[n], dtype=F64) if m == n else v.T for m, v in enumerate(found.factors)]
        projected = unfolded(product(tensor, others), n)
        leading = torch.linalg.svd(projected)[0][:, : ranks[n]]
        torch.testing.assert_close(leading @ leading.T, u @ u.T, atol=1e-8, rtol=0)
        off_diagonal = gram(found.core, n) - gram(found.core, n).diagonal().diag()
        assert off_diagonal.abs().max() < 1e-9
        torch.testing.assert_close(found.singular_values[n], torch.linalg.svdvals(unfolded(tensor, n)))
    # Truncation costs the HOSVD its all-orthogonality.
    assert core_penalty(truncated.core[None]) > 1e-3
    early = multilinear_svd(tensor, ranks, method="hooi", max_iter=1)
    assert not early.converged
    assert early.num_iterations == 1
    assert core_penalty(early.core[None]) < 1e-18 * early.core.square().sum() ** 2


def test_the_error_of_the_truncated_hosvd_is_bounded_by_what_the_modes_leave_out():
    tensor, ranks = random_tensor(3), (3, 2, 3)
    found = multilinear_svd(tensor, ranks)
    rest = [s[r:].square().sum() for s, r in zip(found.singular_values, ranks, strict=True)]
    error = (tensor - product(found.core, found.factors)).square().sum()
    torch.testing.assert_close(error, lost(tensor, found.core))
    assert max(rest) <= error <= sum(rest)


def test_small_singular_values_keep_their_digits():
    # A Gram matrix would know those below 1e-8 of the first no more.
    sizes = torch.logspace(0, -12, 4, dtype=F64)
    u, v = (torch.linalg.qr(torch.randn(n, 4, dtype=F64))[0] for n in (6, 5))
    found = multilinear_svd((u * sizes) @ v.T)
    torch.testing.assert_close(found.singular_values[0][:4], sizes, rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [2.0**-600, 2.0**600])
def test_the_decomposition_scales_with_the_tensor(scale):
    tensor = random_tensor(3)
    for method in ("hosvd", "hooi"):
        found, expected = (multilinear_svd(x, (3, 2, 3), method=method) for x in (scale * tensor, tensor))
        torch.testing.assert_close(found.core / scale, expected.core)
        torch.testing.assert_close(found.singular_values[1] / scale, expected.singular_values[1])


def test_a_mode_longer_than_all_others_together_and_a_zero_tensor():
    tensor = torch.randn(9, 2, 2, dtype=F64)
    found = multilinear_svd(tensor)
    assert found.core.shape == (9, 2, 2)
    torch.testing.assert_close(product(found.core, found.factors), tensor)
    torch.testing.assert_close(found.factors[0].T @ found.factors[0], torch.eye(9, dtype=F64))
    assert not found.singular_values[0][4:].any()  # no rounding: they are filled in
    assert multilinear_svd(tensor, [6, 2, 2], method="hooi").converged
    small = product(torch.randn(2, 2, 2, dtype=F64), [torch.randn(n, 2, dtype=F64) for n in (7, 6, 5)])
    assert multilinear_svd(small, 4, method="hooi", max_iter=20).converged  # more ranks than there are
    nothing = multilinear_svd(torch.zeros(3, 2, 2), 2, method="hooi")
    assert nothing.converged
    assert not nothing.core.any()


@orders
@compatibilities
@methods
def test_primal_scores_equal_dual_scores(order, kind, method):
    phi, compatibility, kernel = features(order, kind)
    ranks = [2] * order
    primal = solvers.kernel_multilinear_svd(phi, ranks, compatibility=compatibility, method=method)
    dual = multilinear_svd(kernel, ranks, method=method)
    expected = solvers.kmlsvd_dual_scores(kernel, dual.factors, dual.core)
    for n in range(order):
        torch.testing.assert_close(primal.svd.factors[n], dual.factors[n], atol=1e-8, rtol=1e-8)
        size = expected[n].abs().max()
        assert (primal.scores[n] - expected[n]).abs().max() < 1e-8 * size
        torch.testing.assert_close(primal.weights[n], phi[n].T @ dual.factors[n], atol=1e-7, rtol=1e-8)
        width = len(primal.svd.singular_values[n])
        torch.testing.assert_close(
            primal.svd.singular_values[n], dual.singular_values[n][:width], atol=1e-9, rtol=1e-9
        )
        assert dual.singular_values[n][width:].sum() < 1e-9
    torch.testing.assert_close(primal.svd.core, dual.core, atol=1e-7, rtol=1e-8)
    printed = [
        unfolded(kernel, n) @ unfolded(product(dual.core, others(dual.factors, n)), n).T for n in range(order)
    ]
    for e, f in zip(expected, printed, strict=True):
        torch.testing.assert_close(e, f)


def others(factors: tuple[Tensor, ...], n: int) -> list[Tensor]:
    """The factors with the identity in place of that of mode n."""
    return [torch.eye(u.size(1), dtype=F64) if m == n else u for m, u in enumerate(factors)]


@orders
@compatibilities
def test_the_dual_objective_is_the_primal_one_for_any_factors_and_core(order, kind):
    phi, compatibility, kernel = features(order, kind)
    u = [torch.randn(n, 2, dtype=F64) for n in SIZES[:order]]
    core = torch.randn([2] * order, dtype=F64)
    grams = [(p.T @ p)[None, None] for p in phi]
    weights = [(p.T @ v)[None] for p, v in zip(phi, u, strict=True)]
    lift = None if compatibility is None else compatibility[None]
    primal = kmlsvd_objective(grams, weights, core[None], compatibility=lift)
    torch.testing.assert_close(solvers.kmlsvd_dual_objective(kernel, u, core), primal)


@orders
@compatibilities
def test_what_the_objective_is_at_each_solution(order, kind):
    phi, compatibility, kernel = features(order, kind)
    size = kernel.square().sum()
    full = [int(torch.linalg.matrix_rank(unfolded(kernel, n))) for n in range(order)]
    options = {"compatibility": compatibility}
    assert abs(solvers.kernel_multilinear_svd(phi, full, **options).objective) < 1e-12 * size
    ranks = [max(1, r - 1) for r in full]
    truncated = solvers.kernel_multilinear_svd(phi, ranks, **options)
    fixed = solvers.kernel_multilinear_svd(phi, ranks, method="hooi", **options)
    share = (order - 2) / 2
    torch.testing.assert_close(
        fixed.objective, share * lost(kernel, fixed.svd.core), rtol=1e-8, atol=1e-11 * size
    )
    least = share * lost(kernel, truncated.svd.core)
    assert truncated.objective >= least - 1e-12 * size
    if order == 2:
        assert abs(truncated.objective) < 1e-12 * size
    else:
        assert truncated.objective > least + 1e-9 * size
        assert truncated.objective > 1e-6 * size


def test_order_2_scores_are_the_kernel_svds_times_the_core():
    # K h_r = h_e sigma are the scores of the kernel SVD; the multilinear ones have sigma once more.
    phi, _, kernel = features(2, "identity")
    found = solvers.kernel_multilinear_svd(phi, 2)
    u, s, vt = np.linalg.svd(kernel.numpy())
    for n, vectors in enumerate((u, vt.T)):
        np.testing.assert_allclose(
            found.scores[n].abs(), np.abs(vectors[:, :2] * s[:2] ** 2), rtol=1e-8, atol=1e-10
        )
    assert abs(found.objective) < 1e-12 * s.sum() ** 2


def test_the_primal_never_forms_the_kernel_tensor():
    phi = [torch.randn(3000, 4, dtype=F64) for _ in range(3)]  # the tensor would have 200 GB
    found = solvers.kernel_multilinear_svd(phi, 2)
    assert [e.shape for e in found.scores] == [(3000, 2)] * 3
    some = multilinear_kernel([p[None, None, :5] for p in phi])[0, 0]
    assert some.shape == (5, 5, 5)


def test_the_estimator_of_a_tensor_remembers_what_the_function_found():
    tensor = random_tensor(3)
    found = multilinear_svd(tensor, (3, 2, 3), method="hooi")
    scores = solvers.kmlsvd_dual_scores(tensor, found.factors, found.core)
    for X in (tensor.numpy(), tensor):
        estimator = solvers.MultilinearSVD((3, 2, 3), method="hooi")
        first = estimator.fit_transform(X)
        assert type(first) is type(X)
        # The same iteration on another buffer: alignment may change the order of a sum, and the last sweep.
        near = {"rtol": 0, "atol": 1e-8 * tensor.norm().item()}
        np.testing.assert_allclose(estimator.core_, found.core, **near)
        for n in range(3):
            np.testing.assert_allclose(estimator.factors_[n], found.factors[n], **near)
            np.testing.assert_allclose(estimator.singular_values_[n], found.singular_values[n], **near)
            np.testing.assert_allclose(estimator.scores_[n], scores[n], rtol=0, atol=1e-8 * scores[n].norm())
        np.testing.assert_allclose(estimator.transform(X[2:4]), first[2:4], rtol=1e-10)
        assert abs(estimator.n_iter_ - found.num_iterations) <= 1
        objective = solvers.kmlsvd_dual_objective(tensor, found.factors, found.core)
        assert estimator.objective_ == pytest.approx(objective.item(), rel=1e-8)


def test_the_estimator_says_when_it_stops_early_and_forgets_an_earlier_fit():
    tensor = random_tensor(3)
    with pytest.warns(ConvergenceWarning, match="max_iter=1 ended"):
        solvers.MultilinearSVD(np.int64(2), method="hooi", max_iter=1).fit(tensor)
    estimator = solvers.MultilinearSVD(1, kernel="features", solver="primal").fit(TWO)
    assert hasattr(estimator, "weights_")
    assert not hasattr(estimator.set_params(solver="dual").fit(TWO), "weights_")


@compatibilities
def test_the_estimator_of_samples_scores_the_fitted_and_new_ones_alike_primal_or_dual(kind):
    phi, compatibility, kernel = features(3, kind)
    samples = [p.numpy() for p in phi]
    lift = None if compatibility is None else compatibility.numpy()
    new = [torch.randn(2, p.size(1), dtype=F64) for p in phi]
    for solver, name in itertools.product(("primal", "dual"), ("identity",)):
        estimator = solvers.MultilinearSVD(
            2, kernel="features", solver=solver, compatibility=lift, feature_map=name
        )
        fitted = estimator.fit_transform(samples)
        expected = solvers.kmlsvd_dual_scores(kernel, *multilinear_svd(kernel, 2)[1::-1])
        for n, (e, f) in enumerate(zip(fitted, expected, strict=True)):
            np.testing.assert_allclose(e, f, rtol=1e-7, atol=1e-8 * f.abs().max().item())
            again = estimator.transform([samples[m] if m == n else None for m in range(3)])
            np.testing.assert_allclose(again[n], e, rtol=1e-7, atol=1e-9 * f.abs().max().item())
            assert [each is None for each in again] == [m != n for m in range(3)]
        outside = estimator.transform([x.numpy() for x in new])
        svd = multilinear_svd(kernel, 2)
        for n in range(3):
            block = features_block(phi, new, n, compatibility, kind)
            printed = unfolded(block, n) @ unfolded(product(svd.core, others(svd.factors, n)), n).T
            np.testing.assert_allclose(outside[n], printed, rtol=1e-7, atol=1e-8 * printed.abs().max().item())
        assert hasattr(estimator, "weights_") == (solver == "primal")


def features_block(phi: list[Tensor], new: list[Tensor], n: int, compatibility, kind: str) -> Tensor:
    """K with mode n read at the new sample."""
    rows = [new[m] if m == n else p for m, p in enumerate(phi)]
    if kind == "full":
        return product(compatibility, rows)
    weights = torch.ones(3, dtype=F64) if compatibility is None else compatibility
    return torch.einsum("a,ia,ja,ka->ijk", weights, *rows)


def test_cubemax_and_a_kernel_of_ones_own():
    samples = [torch.randn(n, 3, dtype=F64) for n in (6, 5, 4)]
    kernel = cubemax_kernel([x[None, None] for x in samples])[0, 0]
    estimator = solvers.MultilinearSVD(2, kernel="cubemax").fit(samples)
    found = multilinear_svd(kernel, 2)
    torch.testing.assert_close(estimator.core_, found.core)
    for n in range(3):
        again = estimator.transform([samples[m] if m == n else None for m in range(3)])[n]
        torch.testing.assert_close(again, estimator.scores_[n])

    def gaussian(parts: list[Tensor]) -> Tensor:
        a, b, c = parts
        total = a[:, None, None] + b[None, :, None] + c[None, None]
        return torch.exp(-total.square().sum(-1))

    mine = solvers.MultilinearSVD((2, 3, 2), kernel=gaussian).fit([x.numpy() for x in samples])
    expected = multilinear_svd(gaussian(samples), (2, 3, 2))
    np.testing.assert_allclose(mine.core_, expected.core, rtol=0, atol=1e-12)
    again = mine.transform([x.numpy()[1:3] for x in samples])
    for n in range(3):
        np.testing.assert_allclose(again[n], mine.scores_[n][1:3], rtol=1e-8, atol=1e-12)


@parametrize_with_checks([solvers.MultilinearSVD(), solvers.MultilinearSVD(1, method="hooi")])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


TWO = [torch.ones(3, 2), torch.ones(4, 2)]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: multilinear_svd(torch.ones(3)), r"tensor has shape \(3,\)"),
        (lambda: multilinear_svd(torch.ones(3, 0)), "none empty"),
        (lambda: multilinear_svd(torch.full((2, 2), torch.inf)), "NaN or infinity"),
        (
            lambda: solvers.kernel_multilinear_svd([TWO[0], TWO[1] / 0]),
            r"features\[1\] holds NaN or infinity",
        ),
        (lambda: solvers.kmlsvd_dual_objective(TWO[0] / 0, TWO, torch.ones(2, 2)), "tensor holds NaN"),
        (
            lambda: solvers.MultilinearSVD(kernel="features").fit([TWO[0], TWO[1] / 0]),
            "sample 1 of X holds NaN",
        ),
        (
            lambda: solvers.MultilinearSVD(kernel=lambda parts: parts[0] / 0).fit(TWO),
            "kernel tensor of X holds",
        ),
        (lambda: solvers.MultilinearSVD().fit(1e30 * torch.ones(3, 2)), "X holds numbers so large"),
        (lambda: solvers.MultilinearSVD().fit(TWO[0]).transform(TWO[0] / 0), "X holds NaN or infinity"),
        (lambda: multilinear_svd(torch.ones(3, 2), 3), "ranks=3"),
        (lambda: multilinear_svd(torch.ones(3, 2), (1, 1, 1)), r"modes' sizes \(3, 2\)"),
        (lambda: multilinear_svd(torch.ones(3, 2), 0), "ranks=0"),
        (lambda: multilinear_svd(torch.ones(3, 2), method="hosdv"), "did you mean 'hosvd'"),
        (lambda: multilinear_svd(torch.ones(3, 2), method="hooi", tol=0.0), "tol=0.0"),
        (lambda: solvers.kernel_multilinear_svd(TWO[:1]), "two modes or more"),
        (lambda: solvers.kernel_multilinear_svd([TWO[0], torch.ones(4, 3)]), "of one width"),
        (lambda: solvers.kernel_multilinear_svd(TWO, compatibility=torch.ones(3)), "of one width"),
        (lambda: solvers.kernel_multilinear_svd(TWO, compatibility=torch.ones(3, 2)), r"C of shape \(2, 2\)"),
        (lambda: solvers.MultilinearSVD(kernel="rbf").fit(TWO), "unknown kernel 'rbf'"),
        (lambda: solvers.MultilinearSVD(solver="both").fit(TWO), "unknown solver"),
        (lambda: solvers.MultilinearSVD(solver="primal").fit(TWO), "needs kernel='features'"),
        (lambda: solvers.MultilinearSVD(kernel="features").fit(TWO[0]), "a list of two samples"),
        (lambda: solvers.MultilinearSVD(kernel="features").fit([TWO[0], torch.ones(3)]), "sample 1 of X"),
        (lambda: solvers.MultilinearSVD(kernel="features").fit(TWO).transform(TWO[:1]), "holds 1 samples"),
        (
            lambda: solvers.MultilinearSVD(kernel="features").fit(TWO).transform([torch.ones(2, 3), None]),
            "has 3 columns, expected 2",
        ),
        (
            lambda: solvers.MultilinearSVD().fit(torch.ones(3, 2, 2)).transform(torch.ones(3, 2, 3)),
            r"expected the fitted one but for the first mode, \(n, 2, 2\)",
        ),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(InputError, match=message):
        call()
