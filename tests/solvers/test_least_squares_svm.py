"""The least-squares SVM beside scikit-learn's ridge regression and machines trained without a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from kernel_attention import InputError
from kernel_attention.solvers import least_squares_svm

# More features than cases is the dual, fewer the primal; 1,100 cases are read in two parts.
SIZES = {"dual": (23, 41), "primal": (41, 23), "square": (7, 7), "two parts": (1100, 5)}


def cases(n, width, *, weighted, dtype=torch.float64):
    features = 3 + torch.randn(n, width, dtype=dtype)
    targets = torch.where(torch.randn(n, 3, dtype=dtype) > 0, 1.0, -1.0).to(dtype)
    return features, targets, torch.rand(n, dtype=dtype) + 0.1 if weighted else None


def ridge(features, targets, weights, strength):
    """scikit-learn's coefficients (F, k) and intercept (k,) for this lambda."""
    weights = None if weights is None else weights.numpy()
    model = Ridge(strength, solver="cholesky").fit(features.numpy(), targets.numpy(), weights)
    return torch.from_numpy(model.coef_.T), torch.from_numpy(model.intercept_)


def unit(features, weights):
    """The mean of w_i ||x_i||^2 of centred features, by itself."""
    weights = torch.ones(len(features)).double() if weights is None else weights
    mean = sum(w * x for w, x in zip(weights, features, strict=True)) / weights.sum()
    lengths = [float(w * (x - mean) @ (x - mean)) for w, x in zip(weights, features, strict=True)]
    return float(np.mean(lengths))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_weights_are_those_of_ridge_regression(size, weighted):
    features, targets, weights = cases(*SIZES[size], weighted=weighted)
    found = least_squares_svm(features, targets, penalties=[0.01], sample_weight=weights)
    weight, intercept = ridge(features, targets, weights, 0.01 * unit(features, weights))
    torch.testing.assert_close(found.weight, weight, rtol=1e-8, atol=1e-10)
    torch.testing.assert_close(found.intercept, intercept, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("size", ["dual", "primal", "square"])
@pytest.mark.parametrize("penalty", [0.3, 1e-6])
def test_left_out_cases_have_the_predictions_of_machines_trained_without_them(size, weighted, penalty):
    features, targets, weights = cases(*SIZES[size], weighted=weighted)
    found = least_squares_svm(features, targets, penalties=[penalty], sample_weight=weights)
    strength = penalty * unit(features, weights)
    for case in range(len(features)):
        others = np.delete(np.arange(len(features)), case)
        kept = None if weights is None else weights[others]
        weight, intercept = ridge(features[others], targets[others], kept, strength)
        expected = features[case] @ weight + intercept
        torch.testing.assert_close(found.left_out[case], expected, rtol=1e-7, atol=1e-8)


def test_the_penalty_has_the_smallest_leave_one_out_error():
    features, _, weights = cases(31, 11, weighted=True)
    targets = features[:, :2].sum(dim=1, keepdim=True) + torch.randn(31, 1, dtype=torch.float64)
    tried = (10.0, 0.1, 1e-3, 1e-5)
    single = [least_squares_svm(features, targets, penalties=[p], sample_weight=weights) for p in tried]
    errors = [float((weights[:, None] * (each.left_out - targets).square()).sum()) for each in single]
    assert np.argmin(errors) > 0  # the first of the tried would be chosen without any comparison
    found = least_squares_svm(features, targets, penalties=tried, sample_weight=weights)
    assert found.penalty == tried[int(np.argmin(errors))]


def test_constant_features_give_the_mean():
    targets = torch.tensor([[1.0], [-1.0], [-1.0]])
    found = least_squares_svm(torch.full((3, 4), 2.0), targets)
    torch.testing.assert_close(found.weight, torch.zeros(4, 1))
    torch.testing.assert_close(found.intercept, targets.mean(dim=0))
    torch.testing.assert_close(found.left_out, torch.tensor([[-1.0], [0.0], [0.0]]))


def test_single_precision_is_computed_in_double():
    features, targets, _ = cases(29, 53, weighted=False, dtype=torch.float32)
    exact = least_squares_svm(features.double(), targets.double(), penalties=[1e-6])
    found = least_squares_svm(features, targets, penalties=[1e-6])
    assert found.weight.dtype == torch.float32
    torch.testing.assert_close(found.weight.double(), exact.weight, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": torch.ones(1, 3)}, r"features has shape \(1, 3\)"),
        ({"features": torch.ones(4)}, r"features has shape \(4,\)"),
        ({"targets": torch.ones(3, 1)}, r"targets has shape \(3, 1\), expected \(4, k\)"),
        ({"features": torch.full((4, 2), torch.nan)}, "features holds NaN"),
        ({"penalties": []}, r"penalties=\[\]"),
        ({"penalties": [0.0]}, r"penalties=\[0.0\]"),
        ({"sample_weight": torch.ones(3)}, r"sample_weight has shape \(3,\)"),
        ({"sample_weight": torch.zeros(4)}, "sample_weight must be finite and above 0"),
    ],
)
def test_bad_arguments_are_named(changes, message):
    arguments = {"features": torch.randn(4, 2), "targets": torch.ones(4, 1)} | changes
    with pytest.raises(InputError, match=message):
        least_squares_svm(arguments.pop("features"), arguments.pop("targets"), **arguments)
