"""The closed form: its leave-one-out predictions, its stacking, and what its views do with any series."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention.series import SequenceSplit, closed_form
from kernel_attention.series import machines as module_of
from kernel_attention.series.closed_form import VIEWS, VIEWS_OF_LENGTHS, ClosedForm, make_view
from kernel_attention.series.machines import fit_closed_form
from kernel_attention.solvers import kernel_least_squares_svm, least_squares_svm
from kernel_attention.solvers.least_squares_svm import fit_weights


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


def test_the_fewer_cases_the_more_even_are_the_weights():
    targets = torch.arange(6) % 3
    scores = torch.stack([torch.nn.functional.one_hot(targets, 3).double(), torch.randn(6, 3).double()])
    shares = []
    for times in (1, 10, 100):
        weights = fit_weights(scores.repeat(1, times, 1), targets.repeat(times))
        shares.append(float(weights[1] / weights.sum()))
    assert 0.5 > shares[0] > shares[1] > shares[2]


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
    features = module.rows("spectrum", split.sequences)
    outputs = (features - module.spectrum_mean) @ module.spectrum_weight + module.intercept
    torch.testing.assert_close(module.predict(split.sequences), outputs)


@pytest.mark.parametrize("scale", [1e2, 1e8, 1e30])
def test_a_series_of_any_size_has_outputs_of_its_own(scale):
    module = fit_closed_form(split_of(n=40), 2, 41).module
    strange = np.full((41, 3), scale, np.float32)
    strange[::7] *= -1
    outputs = module.predict([strange, np.zeros_like(strange)])
    assert outputs.isfinite().all()
    assert len(outputs.unique()) == 4  # none was replaced as no number


def test_beyond_the_landmarks_the_fit_is_nearly_the_exact_one(monkeypatch):
    split, other = split_of(n=60), split_of(n=60, seed=1)
    monkeypatch.setattr(module_of, "MOST_LANDMARKS", 40)
    outputs = fit_closed_form(split, 2, 41).module.predict(other.sequences)
    assert (outputs.argmax(dim=1).numpy() == other.targets).mean() > 0.85


@pytest.mark.parametrize("name", [*VIEWS_OF_LENGTHS, "competing", "segments"])
@pytest.mark.parametrize(("channels", "steps"), [(1, 1), (1, 2), (2, 7), (5, 83), (40, 11)])
def test_a_view_gives_finite_features_for_any_form_of_series(name, channels, steps):
    view = make_view(name, channels, steps)
    x = torch.randn(3, channels, steps)
    view.fit([x], torch.Generator().manual_seed(0))
    others = [torch.randn(3, channels, length) for length in (1, 2, 3, 17, 131)]
    for series in (x, torch.zeros_like(x), 1e6 * x, *others):
        features = view(series)
        assert features.shape == (3, view.num_features)
        assert features.isfinite().all()


@pytest.mark.parametrize("name", ["rocket", "convolutions", "hydra", "spectrum"])
def test_a_period_is_that_of_the_steps_however_long_the_series(name):
    def wave(period, steps):
        return torch.sin(2 * torch.pi / period * torch.arange(steps) + 0.3)[None, None]

    view = make_view(name, 1, 192)
    view.fit([wave(period, 192) for period in (12, 16, 24, 32)], torch.Generator().manual_seed(0))
    same, longer, other = view(wave(16, 192)), view(wave(16, 288)), view(wave(24, 192))
    assert (same - longer).norm() < 0.35 * (same - other).norm()


def test_a_stretched_view_does_not_see_the_tempo():
    view = make_view("stretched_convolutions", 1, 97)
    ramp = torch.linspace(-1, 1, 193)[None, None] ** 3
    view.fit([ramp], torch.Generator().manual_seed(0))
    torch.testing.assert_close(view(ramp), view(ramp[..., ::2]), atol=1e-5, rtol=0)


def test_hydra_counts_the_steps_at_which_a_kernel_responds_least():
    view = make_view("hydra", 1, 83)
    responses = torch.stack([torch.randperm(8) for _ in range(8 * 29)]).reshape(8, 29, 8).mT.flatten(0, 1)
    responses = 3.0 * responses.float()[None] - 10  # any two are further apart than the ramp is long
    _, share = view.read(responses, 0).chunk(2, dim=1)
    least = responses.unflatten(1, (8, 8)).argmin(dim=2)
    expected = torch.nn.functional.one_hot(least, 8).float().mean(dim=2).flatten(1)
    torch.testing.assert_close(share.square(), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [5, 40])
@pytest.mark.parametrize("number", [0, 1, 4, 5])  # as they are and normalised, of dilations 1, 2, 4, 8
def test_a_distance_of_a_shapelet_is_that_of_its_steps_one_by_one(number, steps):
    view = make_view("shapelets", 3, 90)
    view.fit([torch.randn(6, 3, 90)], torch.Generator().manual_seed(0))
    x = torch.randn(2, 3, steps)
    found = view.convolved(x.double(), number)
    dilation = (1, 2, 4, 8)[number % 4]
    if steps < 8 * dilation + 1:  # the last step goes on
        x = torch.cat([x, x[..., -1:].expand(-1, -1, 8 * dilation + 1 - steps)], dim=-1)
    assert found.shape == (2, len(view.pieces[number]), x.size(-1) - 8 * dilation)
    for piece in (0, 17):
        for start in (0, found.size(-1) - 1):
            total = 0.0
            for channel in range(3):
                window = x[1, channel, start : start + 8 * dilation + 1 : dilation].double()
                if number >= 4:
                    window = (window - window.mean()) / (window.var(correction=0) + 1e-4).sqrt()
                if view.channel_weights[number, piece, channel]:
                    total += (window - view.pieces[number, piece, channel]).square().sum()
            radius = view.radii[number, piece]
            torch.testing.assert_close(found[1, piece, start], total / radius, atol=1e-6, rtol=1e-6)


def test_a_shapelet_is_found_wherever_it_is_and_however_often():
    piece = torch.tensor([0.0, 2, -1, 3, 1, -2, 2, 0, -3])
    view = make_view("shapelets", 1, 60)
    view.fit([torch.randn(9, 1, 60)], torch.Generator().manual_seed(0))
    view.pieces[0, 0, 0], view.radii[0, 0] = piece, 0.5
    nearest, shares = [], []
    for starts in ((), (3,), (40,), (3, 40)):
        x = torch.zeros(1, 1, 60)
        for start in starts:
            x[..., start : start + 9] = piece
        near, share = view.read(view.convolved(x, 0), 0).chunk(2, dim=1)
        nearest.append(round(float(near[0, 0]), 5))
        shares.append(round(float(share[0, 0]) * 52))  # windows
    assert (nearest, shares) == ([0.0, 1.0, 1.0, 1.0], [0, 1, 1, 2])


def test_the_duration_tells_lengths_apart():
    view = make_view("duration", 1, 30)
    view.fit([torch.zeros(4, 1, length) for length in (10, 20, 40, 80)], torch.Generator())
    features = torch.cat([view(torch.zeros(1, 1, length)) for length in (10, 20, 40, 80)])
    assert (features @ features.mT).argmax(dim=1).tolist() == [0, 1, 2, 3]


def test_the_covariances_have_the_gradient_of_their_logarithm():
    view = make_view("spectrum", 3, 17)
    torch.autograd.gradcheck(view, torch.randn(2, 3, 17).double().requires_grad_())
    same = torch.zeros(1, 3, 17).double().requires_grad_()  # three equal eigenvalues
    (gradient,) = torch.autograd.grad(view(same).sum(), same)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("name", VIEWS_OF_LENGTHS)
def test_the_features_of_unequal_series_are_those_of_each_alone(name):
    split = split_of(lengths=(19, 41, 30, 7, 23))
    module = fit_closed_form(split, 2, 41, views=[name]).module
    rows, outputs = module.rows(name, split.sequences), module.predict(split.sequences)
    for case, sequence in enumerate(split.sequences):
        torch.testing.assert_close(rows[case : case + 1], module.rows(name, [sequence]), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(outputs[case : case + 1], module.predict([sequence]), atol=1e-4, rtol=1e-4)


def test_a_frequency_is_learnt_from_series_of_any_length():
    lengths = (19, 90, 160, 45, 70)
    split, other = split_of(n=24, lengths=lengths), split_of(n=60, lengths=lengths[::-1], seed=1)
    fit = fit_closed_form(split, 2, 160)
    assert set(fit.weights) == {*VIEWS_OF_LENGTHS, "all"}
    assert (fit.module.predict(other.sequences).argmax(dim=1).numpy() == other.targets).mean() > 0.85


def test_series_beyond_the_most_steps_keep_their_proportions(monkeypatch):
    for module in (closed_form, module_of):
        monkeypatch.setattr(module, "MOST_STEPS", 40)
    module = fit_closed_form(split_of(lengths=(20, 60, 80)), 2, 80, views=("spectrum",)).module
    assert [module.steps(length) for length in (1, 20, 60, 80, 800)] == [1, 10, 30, 40, 40]


def test_a_module_of_an_earlier_release_stretches_its_series():
    options = {"in_features": 3, "num_outputs": 2, "length": 41, "views": ["spectrum", "competing"]}
    module = ClosedForm(**options, sizes={})
    x = torch.randn(5, 29, 3)
    stretched = torch.nn.functional.interpolate(x.mT, size=41, mode="linear", align_corners=True)
    assert torch.equal(module.resampled(x), stretched)
    assert module.options == options | {"sizes": {}, "rate": None}


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
