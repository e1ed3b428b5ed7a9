"""The closed form: its leave-one-out predictions, its stacking, and what its views do with any series."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention.series import SequenceSplit
from kernel_attention.series import closed_form as module_of
from kernel_attention.series.closed_form import VIEWS, fit_closed_form, fit_weights, make_view
from kernel_attention.solvers import kernel_least_squares_svm, least_squares_svm


def split_of(n=23, channels=3, steps=41, classes=2, seed=0, lengths=None):
    """Noise, and a sinusoid whose frequency is that of the class."""
    generator = np.random.default_rng(seed)
    targets = np.arange(n) % classes
    sequences = []
    for case, target in enumerate(targets):
        time = np.arange(steps if lengths is None else lengths[case % len(lengths)])
        wave = np.sin((0.3 + 0.4 * target) * time + generator.uniform(0, 6))
        sequences.append((wave[:, None] + generator.normal(size=(len(time), channels))).astype(np.float32))
    return SequenceSplit(sequences, targets.astype(np.int64))


@pytest.mark.parametrize("weighted", [False, True])
def test_left_out_predictions_are_those_of_machines_trained_without_the_case(weighted):
    features = torch.randn(11, 29, dtype=torch.float64)
    targets = torch.randn(11, 2, dtype=torch.float64)
    weights = torch.rand(11).double() + 0.1 if weighted else None
    found = kernel_least_squares_svm(features @ features.mT, targets, penalties=[0.1], sample_weight=weights)
    w = torch.ones(11).double() if weights is None else weights
    centred = features - (w / w.sum()) @ features
    strength = 0.1 * float(w @ centred.square().sum(dim=1)) / 11
    for case in range(11):
        kept = [other for other in range(11) if other != case]
        rows = torch.cat([features[kept], torch.ones(10, 1)], dim=1)
        square = rows.mT @ (w[kept, None] * rows)
        square += strength * torch.diag(torch.tensor([1.0] * 29 + [0.0]))
        solution = torch.linalg.solve(square, rows.mT @ (w[kept, None] * targets[kept]))
        expected = torch.cat([features[case], torch.ones(1)]) @ solution
        torch.testing.assert_close(found.left_out[case], expected)


def test_the_machine_of_a_linear_kernel_is_that_of_its_features():
    features, targets = torch.randn(13, 7).double(), torch.randn(13, 2).double()
    linear = least_squares_svm(features, targets)
    kernel = features @ features.mT
    landmarks = {"landmarks": kernel[:9, :9]}  # nine landmarks span the seven features
    for found, cross in (
        (kernel_least_squares_svm(kernel, targets), kernel),
        (kernel_least_squares_svm(kernel[:, :9], targets, **landmarks), kernel[:, :9]),
    ):
        assert found.penalty == linear.penalty
        torch.testing.assert_close(found.left_out, linear.left_out)
        torch.testing.assert_close(
            cross @ found.coefficients + found.intercept, features @ linear.weight + linear.intercept
        )


def test_the_weights_minimise_the_log_loss_and_drop_a_predictor_of_noise():
    targets = torch.arange(60) % 3
    good = 2.0 * torch.nn.functional.one_hot(targets, 3).double() - 1 + torch.randn(60, 3).double()
    weights = fit_weights(torch.stack([good, torch.randn(60, 3).double()]), targets)
    assert (weights >= 0).all()
    assert weights[0] > 5 * weights[1]


def test_a_fit_predicts_new_cases_and_its_weights_name_the_views():
    split, other = split_of(), split_of(seed=1)
    fit = fit_closed_form(split, 2, 41)
    assert set(fit.weights) == {*VIEWS, "all"}
    assert fit.left_out.shape == (23, 2)
    assert (fit.left_out.argmax(dim=1).numpy() == split.targets).mean() > 0.85
    assert (fit.module.predict(other.sequences).argmax(dim=1).numpy() == other.targets).mean() > 0.85


def test_the_output_is_a_linear_map_of_the_features():
    split = split_of(n=9)
    fit = fit_closed_form(split, 2, 41, views=("spectrum",))
    module = fit.module
    features = torch.cat([module.features("spectrum", s) for s in module.batches(split.sequences)])
    outputs = (features - module.spectrum_mean) @ module.spectrum_weight + module.intercept
    torch.testing.assert_close(module.predict(split.sequences), outputs)


def test_beyond_the_landmarks_the_fit_is_nearly_the_exact_one(monkeypatch):
    split, other = split_of(n=60), split_of(n=60, seed=1)
    monkeypatch.setattr(module_of, "MOST_LANDMARKS", 40)
    outputs = fit_closed_form(split, 2, 41).module.predict(other.sequences)
    assert (outputs.argmax(dim=1).numpy() == other.targets).mean() > 0.85


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize(("channels", "steps"), [(1, 1), (1, 2), (2, 7), (5, 83), (40, 11)])
def test_a_view_gives_finite_features_for_any_form_of_series(name, channels, steps):
    view = make_view(name, channels, steps)
    x = torch.randn(3, channels, steps)
    view.fit(x, torch.Generator().manual_seed(0))
    for series in (x, torch.zeros_like(x), 1e6 * x):
        features = view(series)
        assert features.shape == (3, view.num_features)
        assert features.isfinite().all()


def test_the_covariances_have_the_gradient_of_their_logarithm():
    view = make_view("spectrum", 3, 17)
    torch.autograd.gradcheck(view, torch.randn(2, 3, 17).double().requires_grad_())
    same = torch.zeros(1, 3, 17).double().requires_grad_()  # three equal eigenvalues
    (gradient,) = torch.autograd.grad(view(same).sum(), same)
    assert gradient.isfinite().all()


def test_lengths_may_differ_and_every_prediction_is_that_of_its_case_alone():
    split = split_of(lengths=(19, 41, 30))
    module = fit_closed_form(split, 2, 41).module
    whole = module.predict(split.sequences)
    torch.testing.assert_close(whole[3:4], module.predict(split.sequences[3:4]), atol=1e-4, rtol=1e-4)


def test_two_cases_a_class_are_enough():
    split, other = split_of(n=10, classes=5, steps=83), split_of(n=50, classes=5, steps=83, seed=1)
    outputs = fit_closed_form(split, 5, 83).module.predict(other.sequences)
    assert (outputs.argmax(dim=1).numpy() == other.targets).mean() > 0.6


def test_values_are_predicted_too():
    generator = np.random.default_rng(0)
    values = generator.uniform(1, 3, 40).astype(np.float32)
    series = [value * generator.normal(size=(50, 1)).astype(np.float32) for value in values]
    split = SequenceSplit(series, (values - values.mean()) / values.std())
    fit = fit_closed_form(split, 1, 50, is_regression=True)
    assert np.square(fit.left_out[:, 0].numpy() - split.targets).mean() < 0.4


def test_without_time_the_first_view_alone_is_read():
    fit = fit_closed_form(split_of(), 2, 41, max_seconds=0.0)
    assert list(fit.module.views) == ["spectrum"]


def test_the_same_seed_gives_the_same_module():
    first, second = (fit_closed_form(split_of(), 2, 41, seed=5).module.state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
