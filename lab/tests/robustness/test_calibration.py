"""Figures of calibration, against loops over the cases and against what is known of them."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from kernel_attention.errors import InputError
from kernel_attention_lab.robustness import calibration_figures, reliability, risk_coverage

N, K = 400, 4


@pytest.fixture
def predicted() -> tuple[np.ndarray, np.ndarray]:
    """Probabilities, and targets drawn from them: the predictions are calibrated."""
    generator = np.random.default_rng(0)
    probabilities = generator.dirichlet(np.ones(K), N)
    targets = np.array([generator.choice(K, p=row) for row in probabilities])
    return probabilities, targets


def test_the_figures_are_those_of_the_definitions(predicted):
    probabilities, targets = predicted
    found = calibration_figures(probabilities, targets, bins=10)
    confidence, choice = probabilities.max(axis=1), probabilities.argmax(axis=1)
    error = 0.0
    for low in np.arange(10) / 10:
        inside = (confidence >= low) & (confidence < low + 0.1)
        if inside.any():
            error += inside.mean() * abs((choice == targets)[inside].mean() - confidence[inside].mean())
    assert found["ece"] == pytest.approx(error)
    assert found["nll"] == pytest.approx(log_loss(targets, probabilities))
    assert found["brier"] == pytest.approx(np.square(probabilities - np.eye(K)[targets]).sum(axis=1).mean())
    assert found["accuracy"] == (choice == targets).mean()
    assert found["error_auroc"] == pytest.approx(roc_auc_score(choice != targets, -confidence))
    parts = np.array_split(np.argsort(confidence, kind="stable"), 10)  # 40 cases each
    adaptive = [abs((choice == targets)[part].mean() - confidence[part].mean()) for part in parts]
    assert found["adaptive_ece"] == pytest.approx(np.mean(adaptive))


@pytest.mark.parametrize("decimals", [8, 1])
def test_figures_of_errors_are_loops_over_the_cases(predicted, decimals):
    """With one decimal most cases are tied: they are taken together, in any order."""
    probabilities, targets = predicted
    doubt = (1 - probabilities.max(axis=1)).round(decimals)
    is_wrong = probabilities.argmax(axis=1) != targets
    found = calibration_figures(probabilities, targets, doubt)
    risks = []
    for order in range(200):
        shuffled = np.random.default_rng(order).permutation(N)
        by_doubt = shuffled[np.argsort(doubt[shuffled], kind="stable")]
        wrong = 0
        risks.append(0.0)
        for count, case in enumerate(by_doubt, start=1):
            wrong += is_wrong[case]
            risks[-1] += wrong / count / N
    deviation = np.std(risks) / np.sqrt(len(risks))
    assert found["aurc"] == pytest.approx(np.mean(risks), abs=5 * deviation + 1e-12)
    for threshold in sorted(set(doubt), reverse=True):
        if (doubt[is_wrong] >= threshold).mean() >= 0.95:
            assert found["error_fpr95"] == pytest.approx((doubt[~is_wrong] >= threshold).mean())
            break
    order = doubt[is_wrong][:, None] - doubt[~is_wrong][None]
    assert found["error_auroc"] == pytest.approx((order > 0).mean() + (order == 0).mean() / 2)


def test_risk_is_that_of_the_most_certain_cases():
    risk = risk_coverage(np.array([True, False, True, False]), np.array([0.1, 0.9, 0.2, 0.3]))
    np.testing.assert_allclose(risk, [0, 0, 1 / 3, 2 / 4])
    np.testing.assert_allclose(risk_coverage(np.array([True, False]), np.ones(2)), [0.5, 0.5])


def test_sharper_probabilities_than_the_targets_deserve_have_a_larger_error(predicted):
    probabilities, targets = predicted
    sharp = probabilities**4 / (probabilities**4).sum(axis=1, keepdims=True)
    honest, proud = (calibration_figures(each, targets) for each in (probabilities, sharp))
    assert proud["accuracy"] == honest["accuracy"]
    for figure in ("ece", "adaptive_ece", "nll", "brier"):
        assert proud[figure] > honest[figure]
    diagram = reliability(sharp, targets)
    assert (diagram.accuracy < diagram.confidence)[-3:].all()
    assert diagram.cases.sum() == N


def test_certain_and_right_is_perfect():
    figures = calibration_figures(np.eye(3), np.arange(3))
    assert figures == {"accuracy": 1, "nll": 0, "brier": 0, "ece": 0, "adaptive_ece": 0, "aurc": 0}


@pytest.mark.parametrize(
    ("probabilities", "targets", "message"),
    [
        (np.ones((2, 2)), [0, 1], "every row must sum to 1"),
        (np.full((2, 2), 0.5), [0, 2], "classes from 0 to 1"),
        (np.full((2, 2), 0.5), [0], r"shape \(2, 2\) and targets of shape \(1,\)"),
        (np.empty((0, 2)), [], "n >= 1"),
    ],
)
def test_what_are_no_probabilities_is_refused(probabilities, targets, message):
    with pytest.raises(InputError, match=message):
        calibration_figures(probabilities, targets)
