"""KernelSVD as theorems, in float64: the decomposition, both representations, new points, iterative forms.

Sources: Primal-Attention, theorem 3.2, remark 3.3 and lemma 4.2, for two samples of different size.
"""

import numpy as np
import pytest
import torch
from scipy.sparse.linalg import aslinearoperator
from sklearn.decomposition import KernelPCA

from kernel_attention.solvers import KernelSVD, kernel_svd, primal_kernel_svd
from kernel_attention.tensors.features.kernel_functions import KERNEL_FUNCTIONS, get_kernel_function
from reference.subspaces import angles, two_samples, unit_columns

P, S = 7, 5
kernels = pytest.mark.parametrize("kernel", sorted(KERNEL_FUNCTIONS))


# The decomposition


@kernels
@pytest.mark.parametrize("center", [False, True])
def test_theorem_3_2_the_shifted_eigenvalue_problem(kernel, center):
    X, Z = two_samples()
    K = get_kernel_function(kernel)(X, Z)
    if center:
        K = K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()
    found = kernel_svd(X, Z, S, kernel=kernel, center=center)
    torch.testing.assert_close(K @ found.right, found.left * found.values)
    torch.testing.assert_close(K.mT @ found.left, found.right * found.values)
    for vectors in (found.left, found.right):
        torch.testing.assert_close(vectors.mT @ vectors, torch.eye(S, dtype=torch.float64))
    torch.testing.assert_close(found.values, torch.linalg.svdvals(K)[:S])


@kernels
@pytest.mark.parametrize("center", [False, True])
def test_lemma_4_2_the_objective_is_zero(kernel, center):
    found = kernel_svd(*two_samples(), S, kernel=kernel, center=center)
    assert abs(found.objective) < 1e-10 * found.values.sum()
    assert found.values.sum() > 0.1


def test_the_objective_is_not_zero_by_construction():
    X, Z = two_samples(400, 300, 40, 40)
    with pytest.warns(RuntimeWarning, match="1 passes over the matrix left a relative residual"):
        rough = kernel_svd(X, Z, S, method="truncated", max_iter=1, n_oversamples=2)
    assert abs(rough.objective) > 1e-3 * rough.values.sum()


def test_signs_are_those_of_the_largest_left_entry():
    found = kernel_svd(*two_samples(), S, kernel="sne")
    largest = found.left.abs().argmax(dim=0)
    assert (found.left[largest, torch.arange(S)] > 0).all()


def test_a_symmetric_positive_kernel_gives_kernel_pca():
    X, new = two_samples()
    gamma = 0.2
    ours = KernelSVD(S, kernel="rbf", gamma=gamma, center=True).fit(X)
    theirs = KernelPCA(S, kernel="rbf", gamma=gamma, eigen_solver="dense").fit(X.numpy())
    np.testing.assert_allclose(ours.singular_values_.numpy(), theirs.eigenvalues_, rtol=1e-10)
    # Their components are unit eigenvectors times sqrt(lambda); e = K h has lambda.
    root = np.sqrt(theirs.eigenvalues_)
    for points in (X, new):
        e, r = ours.transform(points, points)
        torch.testing.assert_close(e, r)
        np.testing.assert_allclose(
            np.abs(e.numpy()), np.abs(theirs.transform(points.numpy()) * root), atol=1e-9
        )


@kernels
def test_the_transposed_kernel_swaps_the_scores(kernel):
    X, Z = two_samples()
    there = KernelSVD(S, kernel=kernel).fit(X, Z)
    back = KernelSVD(S, kernel="precomputed").fit(get_kernel_function(kernel)(X, Z).T)
    torch.testing.assert_close(there.singular_values_, back.singular_values_)
    sign = (there.left_singular_vectors_ * back.right_singular_vectors_).sum(0).sign()
    torch.testing.assert_close(there.left_scores_, sign * back.right_scores_)
    torch.testing.assert_close(there.right_scores_, sign * back.left_scores_)


# The primal


@pytest.mark.parametrize("feature_map", ["cosine", "identity", torch.tanh])
@pytest.mark.parametrize("center", [False, True])
def test_remark_3_3_primal_scores_are_dual_scores(feature_map, center):
    X, Z = two_samples()
    phi = {"cosine": lambda x: x / x.norm(dim=1, keepdim=True), "identity": lambda x: x}.get(
        feature_map, feature_map
    )
    primal = KernelSVD(S, solver="primal", feature_map=feature_map, center=center).fit(X, Z)
    dual = KernelSVD(S, kernel=lambda x, z: phi(x) @ phi(z).T, center=center).fit(X, Z)
    torch.testing.assert_close(primal.singular_values_, dual.singular_values_)
    new = two_samples(11, 13)
    for points in ((X, Z), new):
        for one, other in zip(primal.transform(*points), dual.transform(*points), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-8)
    assert abs(primal.objective_) < 1e-10 * primal.singular_values_.sum()


@pytest.mark.parametrize("solver", ["primal", "primal_stochastic"])
def test_kkt_the_weights_are_the_bridge_of_equation_3(solver):
    X, Z = two_samples()
    found = KernelSVD(3, solver=solver, tol=1e-9, random_state=0).fit(X, Z)
    torch.testing.assert_close(found.w_e_, Z.T @ found.right_singular_vectors_)
    torch.testing.assert_close(found.w_r_, X.T @ found.left_singular_vectors_)


@pytest.mark.parametrize("solver", ["primal", "primal_stochastic"])
def test_a_compatibility_matrix_joins_features_of_different_widths(solver):
    X, Z = two_samples(p=4, q=P)
    C = torch.randn(4, P, dtype=torch.float64)
    found = KernelSVD(3, solver=solver, compatibility=C, tol=1e-9, random_state=0).fit(X, Z)
    dual = KernelSVD(3, kernel="precomputed").fit(X @ C @ Z.T)
    torch.testing.assert_close(found.singular_values_, dual.singular_values_)
    torch.testing.assert_close(found.left_singular_vectors_, dual.left_singular_vectors_)
    assert abs(found.objective_) < 1e-10 * found.singular_values_.sum()
    new_x, new_z = two_samples(11, 13, 4, P)
    e, r = found.transform(new_x, new_z)
    dual_e, dual_r = dual.transform(new_x @ C @ Z.T, X @ C @ new_z.T)
    torch.testing.assert_close(e, dual_e)
    torch.testing.assert_close(r, dual_r)


def test_small_singular_values_keep_their_digits_in_the_primal():
    left, right = (torch.linalg.qr(part)[0] for part in two_samples(p=4, q=4))
    values = torch.tensor([1.0, 1e-3, 1e-6, 1e-9], dtype=torch.float64)
    found = primal_kernel_svd(left * values, right, 4)
    torch.testing.assert_close(found.values, values, rtol=1e-6, atol=0)


# New points


@kernels
@pytest.mark.parametrize("center", [False, True])
def test_training_points_as_new_points_have_their_scores(kernel, center):
    X, Z = two_samples()
    found = KernelSVD(S, kernel=kernel, center=center).fit(X, Z)
    e, r = found.transform(X[5:9], Z[3:10])
    torch.testing.assert_close(e, found.left_scores_[5:9])
    torch.testing.assert_close(r, found.right_scores_[3:10])
    torch.testing.assert_close(found.transform(X), found.left_scores_)
    if center:
        torch.testing.assert_close(found.left_scores_.mean(0), torch.zeros(S, dtype=torch.float64))


@pytest.mark.parametrize("kernel", ["rbf", "softmax", "precomputed"])
def test_scores_of_new_points_are_sums_over_the_sample(kernel):
    X, Z = two_samples()
    new_x, new_z = two_samples(11, 13)
    if kernel == "softmax":  # the row of x_i was normalised over the Z of the fit
        scale = P**-0.5
        sums = (scale * X @ Z.T).exp().sum(1, keepdim=True)
        K, left, right = (scale * X @ Z.T).exp() / sums, (scale * new_x @ Z.T).softmax(1), (
            scale * X @ new_z.T
        ).exp() / sums  # fmt: skip
    else:
        function = get_kernel_function("rbf")
        K, left, right = function(X, Z), function(new_x, Z), function(X, new_z)
    estimator = KernelSVD(S, kernel=kernel)
    e, r = (
        estimator.fit(K).transform(left, right)
        if kernel == "precomputed"
        else estimator.fit(X, Z).transform(new_x, new_z)
    )
    u, _, vt = torch.linalg.svd(K, full_matrices=False)
    torch.testing.assert_close(e.abs(), (left @ vt[:S].T).abs())
    torch.testing.assert_close(r.abs(), (right.T @ u[:, :S]).abs())


# Iterative forms of the dual


@kernels
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("method", ["truncated", "matrix_free"])
def test_truncated_and_matrix_free_are_the_dense_decomposition(kernel, center, method):
    X, Z = two_samples(211, 167)
    options = {"kernel": kernel, "center": center}
    dense = kernel_svd(X, Z, S, method="dense", **options)
    generator = torch.Generator().manual_seed(0)
    found = kernel_svd(X, Z, S, method=method, block_size=29, n_oversamples=4, generator=generator, **options)
    assert found.num_iter > 1
    torch.testing.assert_close(found.values, dense.values, rtol=1e-10, atol=0)
    assert angles(found.left, dense.left).max() < 1e-4
    torch.testing.assert_close(found.e, dense.e, rtol=0, atol=1e-6 * dense.values[0].item())
    torch.testing.assert_close(found.r, dense.r, rtol=0, atol=1e-6 * dense.values[0].item())
    assert abs(found.objective) < 1e-10 * found.values.sum()


def test_restarts_converge_on_a_slow_spectrum():
    left, right = (unit_columns(part) for part in two_samples(300, 280, 250, 250))
    values = 1 - torch.arange(250, dtype=torch.float64) / 400
    found = kernel_svd(
        (left * values) @ right.T, n_components=4, kernel="precomputed", method="truncated",
        n_oversamples=4, max_iter=200, generator=torch.Generator().manual_seed(0),
    )  # fmt: skip
    assert found.num_iter > 12  # two restarts at least
    torch.testing.assert_close(found.values, values[:4], rtol=1e-10, atol=0)
    torch.testing.assert_close(found.left.mT @ found.left, torch.eye(4, dtype=torch.float64))
    assert angles(found.left, left[:, :4]).max() < 1e-4


def test_a_kernel_of_low_rank_and_a_zero_one():
    X, Z = two_samples(300, 250, 3, 3)
    found = kernel_svd(X, Z, S, kernel="linear", method="matrix_free")
    torch.testing.assert_close(found.values, torch.linalg.svdvals(X @ Z.T)[:S])
    zero = kernel_svd(torch.zeros(300, 250), n_components=S, kernel="precomputed", method="truncated")
    assert zero.values.tolist() == [0.0] * S
    assert zero.objective == 0


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_iteration_ends_on_a_matrix_of_few_directions(rank, center, dtype):
    """Its Krylov space is used up after a step or two: what is left to add to the basis is rounding."""
    for seed in range(20):
        torch.manual_seed(seed)
        X, Z = (part.to(dtype) for part in two_samples(50, 45, rank, rank))
        X, Z = X + 10.0 ** (seed % 4), Z + 10.0 ** (seed % 3)
        K = X @ Z.T
        generator = torch.Generator().manual_seed(seed)
        found = kernel_svd(
            K, n_components=4, kernel="precomputed", method="truncated", n_oversamples=1, center=center,
            generator=generator,
        )  # fmt: skip
        exact = (K - K.mean(0) - K.mean(1, keepdim=True) + K.mean() if center else K).double()
        # Rounding of K, and the residual that the iteration is asked for.
        eps = torch.finfo(dtype).eps
        atol = 8 * 95 * eps * K.norm().item() + eps**0.5 * torch.linalg.matrix_norm(exact, ord=2).item()
        torch.testing.assert_close(found.values.double(), torch.linalg.svdvals(exact)[:4], rtol=0, atol=atol)
        for vectors in (found.left, found.right):
            gram = vectors.mT @ vectors
            torch.testing.assert_close(gram, torch.eye(4, dtype=dtype), rtol=0, atol=8 * 95 * eps)
        torch.testing.assert_close(found.r.double(), exact.T @ found.left.double(), rtol=0, atol=2 * atol)


class Products:
    """A matrix that shows nothing but its products."""

    def __init__(self, matrix):
        self.shape, self.dtype, self._matrix = matrix.shape, matrix.dtype, matrix

    def matmul(self, right):
        return self._matrix @ right

    def rmatmul(self, left):
        return self._matrix.T @ left


@pytest.mark.parametrize("wrap", [Products, lambda matrix: aslinearoperator(matrix.numpy())])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_operators(wrap, dtype):
    K = get_kernel_function("sne")(*two_samples(211, 167)).to(dtype)
    dense = KernelSVD(S, kernel="precomputed", svd_method="dense").fit(K)
    found = KernelSVD(S, kernel="precomputed", n_oversamples=4, random_state=0).fit(wrap(K))
    assert type(found.singular_values_) is (torch.Tensor if wrap is Products else np.ndarray)
    assert torch.as_tensor(found.singular_values_).dtype == dtype
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(
        torch.as_tensor(found.singular_values_), dense.singular_values_, rtol=tolerance, atol=0
    )
    assert angles(dense.left_singular_vectors_, torch.as_tensor(found.left_singular_vectors_)).max() < 1


def test_the_matrix_free_form_sees_rows_of_its_block_only():
    seen = []

    def kernel(x, z):
        seen.append((x.size(0), z.size(0)))
        return x @ z.T

    kernel_svd(*two_samples(211, 167), 2, kernel=kernel, method="matrix_free", block_size=50, n_oversamples=2)
    assert set(seen) == {(50, 167), (11, 167)}
