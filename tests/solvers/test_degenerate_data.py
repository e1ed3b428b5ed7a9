"""A campaign over degenerate data: thousands of seeded cases for every solver and function.

In each case the call gives finite results, or a ValueError that names the argument; at ordinary scales there
is no such error. What it gives keeps the theorems up to rounding, ``transform`` repeats ``fit_transform``,
and a second call repeats the first to the last bit.

Tolerances are backward errors, stated as multiples of eps ||K|| (a small number of sums over all entries of
K), of the rounding of the kernel itself, and of sqrt(eps) where an iteration is asked for no more.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("sklearn")

from kernel_attention import solvers
from kernel_attention.tensors.features.kernel_functions import KERNEL_FUNCTIONS, get_kernel_function
from reference.degenerate import Case

pytestmark = pytest.mark.slow

F64 = torch.float64
# Every refusal begins with, or speaks of, one of these.
ARGUMENTS = re.compile(
    r"\b(X|Z|keys|queries|values|targets|tensor|matrix|features(\[\d\])?|compatibility|phi_[xz]|[xz]_batches|"
    r"kernel|feature_map|n_components|ranks)\b"
)
NO_CONVERGENCE = ("left a relative residual", "ended the iteration", "ended the pursuit", "Solver terminated")


class Refused(Exception):
    """The call refused its input, with a message that names an argument."""


@contextlib.contextmanager
def refusals(case: Case, *, may: bool) -> Iterator[None]:
    """Turns a ValueError that names an argument into :class:`Refused`, where it may be one."""
    try:
        yield
    except ValueError as error:
        message = str(error)
    else:
        return
    assert ARGUMENTS.search(message), f"{message} names no argument"
    assert "\n" not in message, f"{message} is not one line"
    assert may, f"refused: {message}"
    raise Refused


def campaign(check: Callable[[Case], None], number: int) -> None:
    """Every seed from 0 to number - 1; all failures at once."""
    failures = []
    for seed in range(number):
        case = Case.draw(seed)
        torch.manual_seed(seed)
        with warnings.catch_warnings():
            for words in NO_CONVERGENCE:
                warnings.filterwarnings("ignore", message=f".*{words}")
            try:
                check(case)
            except Refused:
                pass
            except Exception as error:
                failures.append(f"{case.seed} {case.kind} {case.scale} {case.dtype}: {error!r}"[:300])
    assert not failures, f"{len(failures)} of {number} failed:\n" + "\n".join(failures[:40])


def near(found: Tensor, expected: Tensor, size: float, tolerance: float, what: str) -> None:
    """|found - expected| <= tolerance * size, in numbers that are not squared."""
    off = (found.double() - expected.double()).abs().max().item() if found.numel() else 0.0
    assert off <= tolerance * size, f"{what}: off by {off:.3g}, more than {tolerance * size:.3g}"


def finite(*parts: Tensor) -> None:
    for part in parts:
        if not part.isfinite().all():
            raise AssertionError("not finite")


def same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    for one, other in zip(first, second, strict=True):
        if not torch.equal(one, other):
            raise AssertionError("a second call gives other numbers")


def unit_size(*parts: Tensor) -> tuple[float, list[Tensor]]:
    """The size of the first, and all over it in float64: numbers whose squares stay in range."""
    size = parts[0].abs().max().double().item() or 1.0
    return size, [part.double() / size for part in parts]


def norm(x: Tensor) -> float:
    return torch.linalg.vector_norm(x.double()).item()


def signs_are_those_of_the_largest_entry(left: Tensor) -> None:
    assert (left.gather(0, left.abs().argmax(0, keepdim=True)) >= 0).all(), "signs"


# Kernel SVD


def two(case: Case) -> tuple[Tensor, Tensor | None]:
    n, m, p = case.size(11), case.size(9), case.size(6)
    return case.matrix(n, p), None if case.rng.random() < 0.3 else case.matrix(m, p)


def components(case: Case, most: int) -> int:
    return case.rng.randint(1, most)


def kernel_rounding(name: str, X: Tensor, Z: Tensor) -> float:
    """Relative rounding of a kernel's entries between two orders of its sums.

    An exponential turns the absolute error of its exponent into a relative one. The exponents here are sums
    of p products of numbers up to the largest entry, scaled by 1/p at least.
    """
    if name not in ("exponential", "rbf", "sne", "softmax"):
        return 0.0
    p, largest = X.size(1), max(X.abs().max().item(), Z.abs().max().item())
    return 16 * (p + 3) * torch.finfo(X.dtype).eps * min(largest, 1e100) ** 2


def doubly_centred(K: Tensor) -> Tensor:
    return K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()


def kernel_svd_keeps_its_theorems(case: Case) -> None:
    X, Z = two(case)
    n, m = X.size(0), (X if Z is None else Z).size(0)
    name, method = (
        case.rng.choice(sorted(KERNEL_FUNCTIONS)),
        case.rng.choice(("dense", "truncated", "matrix_free")),
    )
    precomputed, center, rank = case.rng.random() < 0.2, case.rng.random() < 0.5, components(case, min(n, m))
    spoiled = case.rng.random() < 0.05
    if precomputed:
        X, Z = case.matrix(n, m), None
    if spoiled:
        X = case.spoiled(X)
    options = {"kernel": "precomputed" if precomputed else name, "svd_method": method, "center": center}
    # The exponential of a logit of 1e16, the cube of 1e15 in float32, are out of range.
    may = spoiled or not (case.ordinary and (precomputed or (name not in ("exponential", "polynomial"))))
    with refusals(case, may=may or (case.dtype == torch.float32 and case.scale > 1e3)):
        fits = [solvers.KernelSVD(rank, random_state=3, **options).fit(X, Z) for _ in range(2)]
    assert not spoiled
    found = fits[0]
    parts = ("left_singular_vectors_", "singular_values_", "right_singular_vectors_", "left_scores_",
             "right_scores_")  # fmt: skip
    same(*(tuple(getattr(fit, part) for part in parts) for fit in fits))
    left, values, right, e, r = (getattr(found, part) for part in parts)
    finite(left, values, right, e, r, torch.tensor(found.objective_, dtype=F64))
    signs_are_those_of_the_largest_entry(left)
    raw = X if precomputed else get_kernel_function(name)(X, X if Z is None else Z)
    unsure = 0.0 if precomputed else kernel_rounding(name, X, X if Z is None else Z)
    if unsure > 0.1:  # nothing is known of this kernel but that it is finite
        return
    size, (raw, values, e, r) = unit_size(raw, values, e, r)
    K = doubly_centred(raw) if center else raw
    # Samples this small are decomposed in full, so all hold to rounding, of K as it was before centring.
    bound, tolerance = (8 * (n + m) + unsure / case.eps) * norm(raw), case.eps
    left, right = left.double(), right.double()
    for vectors in (left, right):
        near(vectors.T @ vectors, torch.eye(rank, dtype=F64), 8 * (n + m), tolerance, "orthonormal")
    near(K @ right, left * values, bound, tolerance, "K h_r = h_e sigma")
    near(K.T @ left, right * values, bound, tolerance, "K^T h_e = h_r sigma")
    near(e, K @ right, bound, tolerance, "e-scores")
    near(r, K.T @ left, bound, tolerance, "r-scores")
    near(values, torch.linalg.svdvals(K)[:rank], bound, tolerance, "singular values")
    near(torch.tensor(found.objective_ / size, dtype=F64), torch.zeros(()), rank * bound, tolerance, "J")
    with refusals(case, may=False):
        again = found.transform(X, X if precomputed or Z is None else Z)
    near(again[0] / size, e, bound, tolerance, "transform of X")
    near(again[1] / size, r, bound, tolerance, "transform of Z")


def primal_kernel_svd_keeps_its_theorems(case: Case) -> None:
    X, Z = two(case)
    n, m, p = X.size(0), (X if Z is None else Z).size(0), X.size(1)
    rank, center = components(case, min(n, m, p)), case.rng.random() < 0.5
    spoiled = case.rng.random() < 0.05
    X = case.spoiled(X) if spoiled else X
    second = X if Z is None else Z
    with refusals(case, may=spoiled or not case.ordinary):
        fits = [solvers.KernelSVD(rank, solver="primal", center=center).fit(X, Z) for _ in range(2)]
    assert not spoiled
    found = fits[0]
    parts = ("left_singular_vectors_", "singular_values_", "right_singular_vectors_", "left_scores_",
             "right_scores_", "w_e_", "w_r_")  # fmt: skip
    same(*(tuple(getattr(fit, part) for part in parts) for fit in fits))
    left, values, right, e, r, w_e, w_r = (getattr(found, part) for part in parts)
    finite(left, values, right, e, r, w_e, w_r, torch.tensor(found.objective_, dtype=F64))
    signs_are_those_of_the_largest_entry(left)
    (x_size, (x,)), (z_size, (z,)) = unit_size(X), unit_size(second)
    x_raw, z_raw = norm(x), norm(z)
    if center:
        x, z = x - x.mean(0), z - z.mean(0)
    K, left, right = x @ z.T, left.double(), right.double()
    values, e, r = (part.double() / x_size / z_size for part in (values, e, r))
    w_e, w_r = w_e.double() / z_size, w_r.double() / x_size
    bound, tolerance = 8 * (n + m + p) * x_raw * z_raw, case.eps
    # Results below the smallest normal number have lost digits that no relative bound knows of.
    lost = torch.finfo(case.dtype).tiny / x_size / z_size
    bound += lost / tolerance
    for vectors in (left, right):
        near(vectors.T @ vectors, torch.eye(rank, dtype=F64), 8 * (n + m + p), tolerance, "orthonormal")
    near(K @ right, left * values, bound, tolerance, "K h_r = h_e sigma")
    near(K.T @ left, right * values, bound, tolerance, "K^T h_e = h_r sigma")
    near(e, K @ right, bound, tolerance, "remark 3.3, e")
    near(r, K.T @ left, bound, tolerance, "remark 3.3, r")
    near(w_e, z.T @ right, 8 * (m + p) * z_raw + lost / tolerance, tolerance, "w_e")
    near(w_r, x.T @ left, 8 * (n + p) * x_raw + lost / tolerance, tolerance, "w_r")
    near(
        torch.tensor(found.objective_ / x_size / z_size, dtype=F64),
        torch.zeros(()),
        rank * bound,
        tolerance,
        "J",
    )
    with refusals(case, may=not case.ordinary):
        again = found.transform(X, second)
    near(again[0].double() / x_size / z_size, e, bound, tolerance, "transform of X")
    near(again[1].double() / x_size / z_size, r, bound, tolerance, "transform of Z")


# Multilinear SVD


def product(core: Tensor, factors: list[Tensor]) -> Tensor:
    for n, factor in enumerate(factors):
        core = torch.tensordot(core, factor, dims=([n], [1])).movedim(-1, n)
    return core


def multilinear_svd_keeps_its_theorems(case: Case) -> None:
    sizes = [case.size(6) for _ in range(case.rng.choice((2, 3)))]
    tensor = case.matrix(sizes[0], int(torch.tensor(sizes[1:]).prod())).reshape(sizes)
    spoiled = case.rng.random() < 0.05
    tensor = case.spoiled(tensor) if spoiled else tensor
    ranks = [case.rng.randint(1, size) for size in sizes] if case.rng.random() < 0.5 else None
    method = case.rng.choice(("hosvd", "hooi"))
    with refusals(case, may=spoiled or not case.ordinary):
        fits = [solvers.multilinear_svd(tensor, ranks, method=method, max_iter=50) for _ in range(2)]
    assert not spoiled
    found = fits[0]
    same(*((fit.core, *fit.factors, *fit.singular_values) for fit in fits))
    finite(found.core, *found.factors, *found.singular_values)
    size, (tensor_unit, core, *spectra) = unit_size(tensor, found.core, *found.singular_values)
    factors = [u.double() for u in found.factors]
    bound, tolerance = 16 * sum(sizes) * norm(tensor_unit), case.eps
    for n, (u, values) in enumerate(zip(factors, spectra, strict=True)):
        near(u.T @ u, torch.eye(u.size(1), dtype=F64), 16 * sizes[n], tolerance, "orthonormal")
        signs_are_those_of_the_largest_entry(u)
        exact = torch.linalg.svdvals(tensor_unit.movedim(n, 0).flatten(1))
        near(values[: len(exact)], exact, bound, tolerance, "mode-n singular values")
        near(values[len(exact) :], torch.zeros_like(values[len(exact) :]), bound, tolerance, "the others")
    near(core, product(tensor_unit, [u.T for u in factors]), bound, tolerance, "the core")
    if ranks is None:
        near(product(core, factors), tensor_unit, bound, tolerance, "exact at full rank")
    # The projection is orthogonal: what is left out and what is kept are the legs of a right angle.
    rest = norm(tensor_unit - product(core, factors)) ** 2
    near(torch.tensor(rest + norm(core) ** 2, dtype=F64), torch.tensor(norm(tensor_unit) ** 2, dtype=F64),
         2 * bound * norm(tensor_unit), tolerance, "Pythagoras")  # fmt: skip
    # Scores are squares of the tensor's entries.
    estimator = solvers.MultilinearSVD(ranks, method=method, max_iter=50)
    with refusals(case, may=not case.ordinary):
        scores = estimator.fit_transform(tensor)
    again = estimator.transform(tensor)
    finite(scores, again, torch.tensor(estimator.objective_, dtype=F64))
    lost = torch.finfo(case.dtype).tiny / size / size
    bound = bound * norm(tensor_unit) * tolerance + lost
    near(again.double() / size / size, scores.double() / size / size, 1.0, bound, "transform")
    if ranks is None:
        J = torch.tensor(estimator.objective_, dtype=F64) / size / size
        near(J, torch.zeros(()), 1.0, len(sizes) * bound + lost, "J at full rank")


# Principal component pursuit


def pursuit_ends_feasible_and_certified(case: Case) -> None:
    m, n = case.size(8), case.size(8)
    matrix = case.matrix(m, n)
    mask = torch.rand(m, n) < 0.8 if case.rng.random() < 0.3 else None
    spoiled = case.rng.random() < 0.05
    matrix = case.spoiled(matrix) if spoiled else matrix
    if mask is not None and not mask.any():
        mask = None
    if mask is not None and spoiled:
        mask = mask | ~matrix.isfinite()
    with refusals(case, may=spoiled or not case.ordinary):
        fits = [solvers.principal_component_pursuit(matrix, mask=mask, max_iter=300) for _ in range(2)]
    assert not spoiled
    found = fits[0]
    same(*(fit[:3] for fit in fits))
    finite(*found[:3], torch.tensor(found.duality_gap, dtype=F64))
    size, (whole, low, sparse) = unit_size(matrix, found.low_rank, found.sparse)
    known = torch.ones(m, n, dtype=torch.bool) if mask is None else mask
    missed = torch.where(known, whole - low - sparse, 0.0)
    assert found.duality_gap >= -64 * (m + n) * case.eps, f"gap {found.duality_gap}"
    if found.converged:
        tol = max(1e-7, 16 * case.eps)
        lost = torch.finfo(case.dtype).tiny / size
        near(
            missed,
            torch.zeros_like(missed),
            norm(torch.where(known, whole, 0.0)),
            tol + lost + 8 * case.eps,
            "M = L + S",
        )
        assert found.dual.abs().max() <= (known.double().mean() * max(m, n)) ** -0.5 * (1 + 1e-4)
    assert (found.sparse[~known] == 0).all()
    if mask is None:
        estimator = solvers.PrincipalComponentPursuit(max_iter=300).fit(matrix)
        same((estimator.low_rank_, estimator.sparse_), found[:2])


# Kernel PCA


def plain_gram(keys: Tensor) -> Tensor:
    """K~, with exponentials that overflow where they will."""
    k = (keys @ keys.T / keys.size(1) ** 0.5).exp()
    g = k.sum(1)
    return doubly_centred(k / g / g[:, None])


def kernel_pca_values_keep_theorem_1(case: Case) -> None:
    n, p = case.size(11), case.size(6)
    keys = case.matrix(n, p)
    rank = components(case, n)
    spoiled = case.rng.random() < 0.05
    keys = case.spoiled(keys) if spoiled else keys
    with refusals(case, may=spoiled or not case.ordinary):
        fits = [solvers.kernel_pca_values(keys, rank) for _ in range(2)]
    assert not spoiled
    found = fits[0]
    same(*(tuple(fit) for fit in fits))
    finite(found.values, found.eigenvalues, found.log_normalizer)
    assert not found.coefficients.isnan().any()
    none = found.log_eigenvalues.isneginf()
    assert not found.log_eigenvalues.isnan().any()
    assert (found.values[:, none] == 0).all()
    assert (found.coefficients[:, none] == 0).all()
    assert (found.eigenvalues[none] == 0).all()
    assert (found.eigenvalues <= (1 + 1e-5) / n).all()
    distinct = len(torch.unique(keys, dim=0))
    assert int((~none).sum()) <= distinct - 1, f"{int((~none).sum())} components of {distinct} points"
    exact = keys.double()
    logit = (exact.square().sum(1) / p**0.5).max().item()
    if not logit < 100:  # where the plain exponentials are in range, with all their products
        return
    gram = plain_gram(exact)
    bound = case_rounding(n, p, logit, norm(gram) + (1 / n))
    directions = torch.nn.functional.normalize(found.coefficients.double(), dim=0)
    sizes = n * found.eigenvalues.double()
    single = 8 * torch.finfo(found.values.dtype).eps * norm(gram)
    near(gram @ directions, directions * sizes, 1.0, bound + single, "eigenvectors")
    assert not solvers.projection_error(keys, keys, found.values).isnan()
    if n > 1:
        ratios = solvers.eigenvalue_ratios(keys, found.values)
        finite(ratios.eigenvalues, ratios.cosine)
        projected = solvers.KernelPCAValues(rank).fit(keys).transform(keys)
        finite(projected)


def case_rounding(n: int, p: int, logit: float, size: float) -> float:
    """The bound of the solver's docstring, once for its arithmetic and once for that of the oracle here."""
    return 2 * torch.finfo(F64).eps * size * n * (2 * (p + 5) * logit + 8 * (n + 3))


# Support vector expansion


def support_vectors_keep_their_constraints(case: Case) -> None:
    n, p, d = max(2, case.size(9)), case.size(4), case.size(3)
    keys = case.matrix(n, p)
    targets = case.normal(n, d).to(case.dtype) * case.rng.choice((1e-3, 1.0, 1e3))
    spoiled = case.rng.choice((None,) * 20 + (0, 1))
    if spoiled == 0:
        keys = case.spoiled(keys)
    if spoiled == 1:
        targets = case.spoiled(targets)
    C, epsilon = case.rng.choice((0.1, 1.0, 100.0)), case.rng.choice((0.0, 0.1, 10.0))
    # Keys of very different lengths: alpha / h leaves the range where logits reach 709 (88 in float32).
    may = spoiled is not None or case.scale > 1
    with refusals(case, may=may):
        fits = [
            solvers.SupportVectorExpansion(C, epsilon=epsilon, max_iter=10_000).fit(keys, targets)
            for _ in range(2)
        ]  # fmt: skip
        predicted = fits[0].predict(keys)
    assert spoiled is None
    found = solvers.support_vector_expansion(keys, targets, C=C, epsilon=epsilon, max_iter=10_000)
    same(*((fit.values_, fit.intercept_, fit.dual_coef_) for fit in fits))
    finite(found.values, found.intercept, predicted)
    assert not found.dual_coefficients.isnan().any()
    duals = found.dual_coefficients.double() * found.unit.double()
    if duals.isfinite().all() and found.unit > torch.finfo(found.unit.dtype).tiny:
        assert duals.abs().max() <= C * (1 + 8 * torch.finfo(found.unit.dtype).eps), "remark 1"
        near(
            duals.sum(0),
            torch.zeros(d),
            n * C,
            1e-9 + 8 * torch.finfo(found.unit.dtype).eps,
            "alphas sum to 0",
        )


CAMPAIGN = [
    (kernel_svd_keeps_its_theorems, 2500),
    (primal_kernel_svd_keeps_its_theorems, 800),
    (multilinear_svd_keeps_its_theorems, 700),
    (pursuit_ends_feasible_and_certified, 400),
    (kernel_pca_values_keep_theorem_1, 1200),
    (support_vectors_keep_their_constraints, 400),
]


@pytest.mark.parametrize(("check", "number"), CAMPAIGN, ids=[check.__name__ for check, _ in CAMPAIGN])
def test_degenerate_data(check, number):
    campaign(check, number)
