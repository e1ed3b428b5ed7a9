"""Support vector regression as an attention, against scikit-learn's SVR on the printed kernel."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.functional import softmax_attention

pytest.importorskip("sklearn")
from sklearn.svm import SVR
from sklearn.utils.estimator_checks import parametrize_with_checks

from kernel_attention import solvers

KEYS, QUERIES, WIDTH, TARGETS = 23, 7, 5, 3


@pytest.fixture
def problem():
    generator = np.random.default_rng(0)
    keys, queries = generator.normal(size=(KEYS, WIDTH)), generator.normal(size=(QUERIES, WIDTH))
    return keys, queries, np.sin(keys @ generator.normal(size=(WIDTH, TARGETS)))


def exponential(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.exp(x @ y.T / math.sqrt(WIDTH))


def printed_kernel(x: np.ndarray, y: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """k(x, y) / (h(x) h(y)), h(x) the sum over the keys (eq. 11)."""
    return exponential(x, y) / exponential(x, keys).sum(1)[:, None] / exponential(y, keys).sum(1)


def test_theorem_1_predictions_are_those_of_the_regression_on_the_printed_kernel(problem):
    keys, queries, targets = problem
    gram = printed_kernel(keys, keys, keys)
    estimator = solvers.SupportVectorExpansion(C=2.0, epsilon=0.3, tol=1e-8).fit(keys, targets)
    predicted = estimator.predict(queries)
    for d, column in enumerate(targets.T):
        # The same problem in the kernel's own unit.
        reference = SVR(kernel="precomputed", C=2.0 / gram.diagonal().mean(), epsilon=0.3, tol=1e-8)
        reference.fit(gram, column)
        dual = np.zeros(KEYS)
        dual[reference.support_] = reference.dual_coef_[0]
        assert 0 < (dual != 0).sum() < KEYS
        # Two runs of libsvm agree to its tolerance, not to the last bit.
        scale = np.abs(dual).max()
        np.testing.assert_allclose(estimator.dual_coef_[:, d], dual, atol=1e-5 * scale)
        expected = reference.predict(printed_kernel(queries, keys, keys))
        np.testing.assert_allclose(predicted[:, d], expected, atol=1e-6)


def test_the_expansion_is_softmax_attention_with_values_alpha_over_h(problem):
    keys, queries, targets = problem
    estimator = solvers.SupportVectorExpansion(C=10.0, epsilon=0.01).fit(keys, targets)
    h = exponential(keys, keys).sum(1)[:, None]
    np.testing.assert_allclose(estimator.values_, estimator.dual_coef_ / h, rtol=1e-12)
    q, k, v = (torch.from_numpy(x)[None, None] for x in (queries, keys, estimator.values_))
    attended = softmax_attention(q, k, v)[0, 0].numpy()
    np.testing.assert_allclose(estimator.attention(queries), attended, rtol=1e-12)
    expansion = printed_kernel(queries, keys, keys) @ estimator.dual_coef_ + estimator.intercept_
    np.testing.assert_allclose(estimator.predict(queries), expansion, rtol=1e-9, atol=1e-10)


def test_remark_1_the_values_are_bounded_by_the_penalty(problem):
    keys, _, targets = problem
    unit = printed_kernel(keys, keys, keys).diagonal().mean()
    found = solvers.support_vector_expansion(torch.from_numpy(keys), torch.from_numpy(targets), C=0.1)
    assert found.unit.item() == pytest.approx(unit)
    assert found.dual_coefficients.abs().max().item() == pytest.approx(0.1 / unit)


def test_it_learns_and_a_wide_tube_learns_nothing(problem):
    keys, _, targets = problem
    close = solvers.SupportVectorExpansion(C=1e5, epsilon=0.01, tol=1e-6).fit(keys, targets)
    assert np.abs(close.predict(keys) - targets).max() < 0.011
    wide = solvers.SupportVectorExpansion(epsilon=10.0).fit(keys, targets)
    assert not wide.values_.any()
    np.testing.assert_allclose(wide.predict(keys), np.broadcast_to(wide.intercept_, targets.shape))


def test_large_inputs_stay_in_log_space(problem):
    keys, queries, targets = problem
    keys = (
        35 * keys / np.linalg.norm(keys, axis=1, keepdims=True)
    )  # logits up to 548; h and its square overflow
    estimator = solvers.SupportVectorExpansion(C=100.0, epsilon=0.01).fit(keys, targets)
    assert np.abs(estimator.predict(keys) - targets).max() < 0.011
    assert np.isfinite(estimator.predict(35 * queries)).all()


def test_keys_that_are_no_support_vectors_have_the_value_0_whatever_their_length():
    # On a line, a short key's h is the exponential of a product with the long one: 1/h overflows, times 0.
    keys = torch.tensor([[1.0], [2.0], [30.0], [31.0]], dtype=torch.float64)
    targets = torch.tensor([[0.0], [0.05], [0.0], [5.0]], dtype=torch.float64)
    found = solvers.support_vector_expansion(keys, targets)
    assert not found.values.isnan().any()
    assert not found.dual_coefficients.isnan().any()
    assert solvers.SupportVectorExpansion().fit(keys, targets).predict(keys).isfinite().all()
    wide = solvers.SupportVectorExpansion(epsilon=10.0).fit(100 * keys, targets)
    assert not wide.values_.any()
    assert wide.predict(100 * keys).isfinite().all()


def test_torch_in_torch_out_and_the_shape_of_the_targets(problem):
    keys, queries, targets = problem
    one = solvers.SupportVectorExpansion().fit(keys, targets[:, 0])
    assert one.predict(queries).shape == (QUERIES,)
    assert one.attention(queries).shape == (QUERIES, 1)
    all_of_them = solvers.SupportVectorExpansion().fit(keys, targets)
    np.testing.assert_allclose(all_of_them.predict(queries)[:, 0], one.predict(queries), rtol=1e-12)
    tensors = [torch.from_numpy(x).float() for x in problem]
    estimator = solvers.SupportVectorExpansion().fit(tensors[0], tensors[2])
    predicted = estimator.predict(tensors[1])
    assert predicted.dtype == estimator.values_.dtype == torch.float32
    np.testing.assert_allclose(predicted, all_of_them.predict(queries), atol=1e-3)


@parametrize_with_checks([solvers.SupportVectorExpansion()])
@pytest.mark.filterwarnings("ignore")
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"keys": torch.ones(1, 2), "targets": torch.ones(1, 1)}, {}, r"keys has shape \(1, 2\)"),
        ({"targets": torch.ones(3, 1)}, {}, r"targets has shape \(3, 1\), expected \(4, d\)"),
        ({"targets": torch.ones(4)}, {}, r"targets has shape \(4,\)"),
        ({"targets": torch.full((4, 1), torch.nan)}, {}, "targets holds NaN"),
        ({"keys": torch.full((4, 2), torch.inf)}, {}, "keys holds NaN or infinity"),
        ({"keys": 1e200 * torch.ones(4, 2).double()}, {}, "keys holds numbers so large that their products"),
        (
            {"keys": torch.tensor([[1.0], [2.0], [500.0], [510.0]]), "targets": torch.arange(4.0)[:, None]},
            {},
            "keys holds numbers so large that the values of their regression",
        ),
        ({}, {"C": 0.0}, "C=0.0 must be positive"),
        ({}, {"epsilon": -0.1}, "epsilon=-0.1 must be 0 or more"),
    ],
)
def test_bad_input_is_named(change, options, message):
    data = {"keys": torch.ones(4, 2), "targets": torch.ones(4, 1), **change}
    with pytest.raises(InputError, match=message):
        solvers.support_vector_expansion(data["keys"], data["targets"], **options)
