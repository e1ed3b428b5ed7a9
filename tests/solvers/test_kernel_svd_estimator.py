"""KernelSVD as an estimator: what goes in and comes out, parameters, scikit-learn's checks, bad input."""

import pickle
import re

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention.errors import InputError
from kernel_attention.solvers import KernelSVD, kernel_svd, primal_kernel_svd, stochastic_kernel_svd
from reference.subspaces import two_samples

P, S = 7, 5


class Products:
    """A matrix that shows nothing but its products."""

    def __init__(self, matrix):
        self.shape, self.matmul, self.rmatmul = matrix.shape, matrix.matmul, matrix.T.matmul


def close(tensor, array):
    """The same formula on another buffer, whose alignment may change the order of a sum."""
    size = tensor.abs().max().item()
    np.testing.assert_allclose(array, tensor.numpy(), rtol=0, atol=1e3 * torch.finfo(tensor.dtype).eps * size)


@pytest.mark.parametrize("solver", ["dual", "primal", "primal_stochastic"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_arrays_give_arrays_and_tensors_tensors_of_their_precision(solver, dtype):
    X, Z = (part.to(dtype) for part in two_samples())
    options = {"n_components": 3, "solver": solver, "random_state": 0}
    tensors, arrays = KernelSVD(**options).fit(X, Z), KernelSVD(**options).fit(X.numpy(), Z.numpy())
    names = [
        "singular_values_",
        "left_singular_vectors_",
        "right_singular_vectors_",
        "left_scores_",
        "right_scores_",
    ]
    names += ["w_e_", "w_r_"] if solver != "dual" else []
    for name in names:
        tensor, array = getattr(tensors, name), getattr(arrays, name)
        assert isinstance(array, np.ndarray)
        assert tensor.dtype == dtype
        close(tensor, array)
    for tensor, array in zip(tensors.transform(X, Z), arrays.transform(X.numpy(), Z.numpy()), strict=True):
        assert tensor.dtype == dtype
        close(tensor, array)
    assert isinstance(tensors.objective_, float)


STATES = [lambda: 3, lambda: np.random.RandomState(3), lambda: torch.Generator().manual_seed(3)]


@pytest.mark.parametrize("options", [{"svd_method": "matrix_free"}, {"solver": "primal_stochastic"}])
@pytest.mark.parametrize("state", STATES, ids=["int", "numpy", "torch"])
def test_random_state_fixes_the_result(options, state):
    X, Z = two_samples(300, 250, 90, 90)
    options = {"n_components": 2, "n_oversamples": 2, "tol": 1e-2, **options}
    first, second = (KernelSVD(random_state=state(), **options).fit(X, Z) for _ in range(2))
    assert torch.equal(first.left_scores_, second.left_scores_)
    other = KernelSVD(random_state=4, **options).fit(X, Z)
    assert not torch.equal(first.left_scores_, other.left_scores_)
    fresh = [KernelSVD(random_state=None, **options).fit(X, Z).left_scores_ for _ in range(2)]
    assert not torch.equal(*fresh)


class OneSample(KernelSVD):
    """scikit-learn's checks pass labels as second argument, which for a KernelSVD is a second sample.

    With one sample only it is a transformer like any other.
    """

    def fit(self, X, y=None):
        return super().fit(X)

    def transform(self, X):
        return super().transform(X)

    def fit_transform(self, X, y=None):
        return super().fit_transform(X)

    partial_fit = property()  # takes two samples always


CHECKED = [
    OneSample(random_state=0),
    OneSample(kernel="softmax"),
    OneSample(solver="primal"),
    OneSample(1, solver="primal_stochastic", random_state=0),
]


@parametrize_with_checks(CHECKED)
def test_sklearn_check(estimator, check):
    check(estimator)


@pytest.mark.parametrize("solver", ["primal", "primal_stochastic"])
@pytest.mark.parametrize(
    "feature_map", ["elu", {"softmax_plus": {"num_features": 16, "seed": 5}}, torch.tanh]
)
def test_feature_maps_and_centring(solver, feature_map):
    X, Z = two_samples()
    options = {"feature_map": feature_map, "feature_map_z": feature_map, "tol": 1e-9, "random_state": 0}
    found = KernelSVD(3, solver=solver, center=True, **options).fit(X, Z)
    e, r = found.transform(X, Z)
    torch.testing.assert_close(e, found.left_scores_)
    torch.testing.assert_close(r, found.right_scores_)
    torch.testing.assert_close(r.mean(0), torch.zeros(3, dtype=torch.float64))
    K = found._features(X, "x") @ found._features(Z, "z").T
    K = K - K.mean(0) - K.mean(1, keepdim=True) + K.mean()
    torch.testing.assert_close(found.singular_values_, torch.linalg.svdvals(K)[:3])


def test_parameters_are_stored_verbatim_cloned_and_pickled():
    C, parameters = np.eye(P), {"scale": 2.0}
    estimator = KernelSVD(3, compatibility=C, kernel_params=parameters, solver="primal", feature_map="cosine")
    assert estimator.compatibility is C
    assert estimator.kernel_params is parameters
    X, Z = two_samples()
    found = pickle.loads(pickle.dumps(clone(estimator).fit(X, Z)))
    torch.testing.assert_close(found.transform(X), found.left_scores_)
    assert found.get_feature_names_out().tolist() == ["kernelsvd0", "kernelsvd1", "kernelsvd2"]


def test_kernel_parameters_reach_the_kernel():
    X, Z = two_samples()
    by_name = KernelSVD(S, kernel="polynomial", gamma=0.3, degree=2, coef0=0.5).fit(X, Z)
    by_hand = KernelSVD(S, kernel="precomputed").fit((0.3 * X @ Z.T + 0.5) ** 2)
    torch.testing.assert_close(by_name.singular_values_, by_hand.singular_values_)
    by_call = KernelSVD(S, kernel=lambda x, z, power: (x @ z.T) ** power, kernel_params={"power": 3})
    by_hand = KernelSVD(S, kernel="precomputed").fit((X @ Z.T) ** 3)
    torch.testing.assert_close(by_call.fit(X, Z).singular_values_, by_hand.singular_values_)


def test_a_refit_leaves_nothing_behind():
    X, Z = two_samples()
    estimator = KernelSVD(3, solver="primal").fit(X, Z)
    estimator.set_params(solver="dual").fit(X, Z)
    assert not hasattr(estimator, "w_e_")
    estimator.set_params(solver="primal_stochastic", random_state=0).fit(X, Z).partial_fit(X, Z)
    assert not hasattr(estimator, "left_singular_vectors_")
    assert estimator.n_iter_ == 1


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"n_components": 0}, "n_components=0 must be a whole number from 1"),
        ({"n_components": 24}, "n_components=24 must be at most 23"),
        ({"n_components": 2.0}, "n_components=2.0 must be a whole number"),
        ({"solver": "dul"}, "unknown solver 'dul'; did you mean 'dual'"),
        ({"svd_method": "lanczos"}, "unknown method 'lanczos'"),
        ({"kernel": "rbg"}, "unknown kernel 'rbg'; did you mean 'rbf'"),
        ({"gamma": -1.0}, "gamma=-1.0 of kernel 'rbf' must be above 0"),
        ({"kernel_params": {"width": 1}}, "unknown parameter of kernel 'rbf' 'width'"),
        ({"kernel": lambda x, z: x}, "kernel must return a tensor of shape (31, 23)"),
        ({"kernel": "precomputed"}, "takes the matrix as X and no Z"),
        ({"n_oversamples": -1}, "n_oversamples=-1"),
        ({"tol": -1e-3}, "tol=-0.001"),
        ({"max_iter": 0}, "max_iter=0"),
        ({"block_size": 0, "svd_method": "matrix_free"}, "block_size=0"),
        ({"solver": "primal_stochastic", "batch_size": 0}, "batch_size=0"),
        ({"solver": "primal", "n_components": 8}, "n_components=8 must be at most 7"),
        ({"solver": "primal", "feature_map": "cos"}, "unknown feature_map 'cos'"),
        ({"solver": "primal", "feature_map": "frobenius"}, "map of a whole sequence"),
        ({"solver": "primal", "feature_map_z": lambda x: x.sum()}, "feature_map_z must return a tensor"),
        ({"solver": "primal", "feature_map_z": lambda x: x[:, :2]}, "a compatibility matrix of shape (7, 2)"),
        ({"solver": "primal", "compatibility": np.eye(3)}, "compatibility has shape (3, 3), expected (7, 7)"),
    ],
)  # fmt: skip
def test_bad_parameters(parameters, words):
    with pytest.raises(InputError, match=re.escape(words)):
        KernelSVD(**parameters).fit(*two_samples())


@pytest.mark.parametrize("solver", ["dual", "primal", "primal_stochastic"])
@pytest.mark.parametrize("scale", [1e-113, 1e-95, 1e95, 1e113])
def test_singular_values_scale_with_the_data(solver, scale):
    X, Z = two_samples()
    options = {"n_components": 3, "kernel": "linear", "solver": solver, "random_state": 0}
    found, expected = KernelSVD(**options).fit(scale * X, scale * Z), KernelSVD(**options).fit(X, Z)
    torch.testing.assert_close(found.singular_values_ / scale / scale, expected.singular_values_)
    torch.testing.assert_close(found.left_singular_vectors_, expected.left_singular_vectors_)
    for found_scores, scores in zip(
        found.transform(scale * X, scale * Z), expected.transform(X, Z), strict=True
    ):
        torch.testing.assert_close(found_scores / scale / scale, scores)
    assert abs(found.objective_) < 1e-10 * found.singular_values_.sum()


@pytest.mark.parametrize("svd_method", ["dense", "truncated", "matrix_free"])
@pytest.mark.parametrize("rows", [7, 60])
@pytest.mark.parametrize("rank", [1, 3])
def test_centred_scores_of_the_null_space_are_zero_when_transformed_too(svd_method, rows, rank):
    # Three points often: the centred kernel has rank 2, and a null space that holds the constants.
    X, Z = (part[:rank].repeat(rows, 1) for part in two_samples())
    found = KernelSVD(5, kernel="rbf", center=True, svd_method=svd_method, n_oversamples=1, random_state=0)
    scores = found.fit_transform(X, Z)
    # A few sums over the entries of K, which are at most 1, in each score.
    tolerance = 8 * len(X) * len(X) * torch.finfo(X.dtype).eps
    for one, other in zip(found.transform(X, Z), scores, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance)
        torch.testing.assert_close(one[:, rank:], torch.zeros_like(one[:, rank:]), rtol=0, atol=tolerance)


def test_a_kernel_that_is_not_finite_is_refused_by_name():
    X, Z = two_samples()
    bad = X.clone()
    bad[3, 1] = torch.inf
    for call in (
        lambda: kernel_svd(bad, n_components=1, kernel="precomputed"),
        lambda: KernelSVD(1, kernel=lambda x, z: x @ z.T / 0).fit(X, Z),
        lambda: KernelSVD(1, kernel="exponential").fit(1e4 * X, 1e4 * Z),
        lambda: KernelSVD(1, kernel="linear", svd_method="matrix_free").fit(1e200 * X, 1e200 * Z),
        lambda: KernelSVD(1, kernel="precomputed").fit(Products(bad)),
    ):
        with pytest.raises(InputError, match="the kernel matrix of X and Z holds NaN or infinity"):
            call()
    for call, words in (
        (lambda: primal_kernel_svd(bad, X, 1), "phi_x holds NaN or infinity"),
        (lambda: stochastic_kernel_svd(lambda: [X], lambda: [bad], 1), "z_batches holds NaN or infinity"),
        (lambda: KernelSVD(1, solver="primal", feature_map=torch.log).fit(X, Z), "returns NaN or infinity"),
        (lambda: KernelSVD(1, solver="primal").fit(1e200 * X, 1e200 * Z), "X holds numbers so large"),
        (
            lambda: KernelSVD(1, kernel="linear").fit(X, 1e9 * Z).transform(1e300 * X),
            "X holds numbers so large",
        ),
    ):
        with pytest.raises(InputError, match=words):
            call()


def test_bad_data():
    X, Z = two_samples()
    fitted = KernelSVD(3).fit(X, Z)
    bad = Z.clone()
    bad[2, 1] = torch.nan
    for call, words in (
        (lambda: KernelSVD().fit(X, bad), "Z holds NaN or infinity"),
        (lambda: KernelSVD().fit(bad, X), "X holds NaN or infinity"),
        (lambda: KernelSVD().fit(X.half()), "X has dtype torch.float16"),
        (lambda: KernelSVD().fit(X, Z[:, 0]), "Z has shape (23,)"),
        (lambda: KernelSVD().fit(X, Z[:, :4]), "Z has 4 features and X 7"),
        (lambda: KernelSVD().fit(X.numpy(), bad.numpy()), "Input Z contains NaN"),
        (lambda: KernelSVD().fit(Products(X)), "X is an operator: kernel must be 'precomputed'"),
        (lambda: fitted.transform(X[:, :3]), "X has 3 features, expected 7"),
        (lambda: fitted.transform(X, Z[:, :3]), "Z has 3 features, expected 7 as in fit"),
        (lambda: KernelSVD().transform(X), "not fitted"),
        (lambda: KernelSVD().partial_fit(X, Z), "partial_fit needs solver='primal_stochastic'"),
        (lambda: KernelSVD(kernel="precomputed").fit(X).transform(X, X[:4]), "Z has 4 rows, expected 31"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(words)):
            call()
