"""A signal far from zero is learnt as one at zero: series are centred in float64 before they are rounded."""

import pickle

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.series import Standardizer
from kernel_attention.series.outputs import model_scale, predict_outputs

OFFSETS = [1e6, 1.7e9, 1e12]
STEPS = 24


def waves(cases, offset=0.0):
    """Slow and fast waves of size 1, in two channels of which the second has its offset with another sign."""
    generator = np.random.default_rng(0)
    time, labels = np.linspace(0, 1, STEPS), np.arange(cases) % 2
    X = np.stack(
        [np.sin(2 * np.pi * (2 + 4 * label) * time + generator.uniform(0, 6, (2, 1))) for label in labels]
    )
    return np.round(X * 2**8) / 2**8 + np.array([[offset], [-offset]]), labels  # exact at every offset


@pytest.mark.parametrize(
    ("offset", "stem"),
    [*((offset, "linear") for offset in OFFSETS), (OFFSETS[1], "convolution"), (OFFSETS[1], "rocket")],
)
def test_the_offset_changes_nothing(small, offset, stem, tmp_path):
    options = small | {"stem": stem, "augmentation": ["jitter", "cut"], "views": ("raw", "difference")}
    plain, y = waves(12)
    moved, _ = waves(12, offset)
    fitted = AttentionClassifier(**options).fit(moved, y)
    fitted.save(tmp_path / "fitted")
    for classifier in (fitted, AttentionClassifier.load(tmp_path / "fitted")):
        scale = model_scale(classifier.model_)
        np.testing.assert_allclose(scale.mean, moved.mean(axis=(0, 2)), rtol=1e-13)
        np.testing.assert_allclose(scale.std, plain.std(axis=(0, 2)), rtol=1e-3)
        outputs = classifier._outputs(moved)
        assert (outputs - outputs.mean(dim=0)).abs().max() > 0.01
        # One case alone, whose own spread says nothing of the scale.
        torch.testing.assert_close(classifier._outputs(moved[:1]), outputs[:1], atol=1e-4, rtol=1e-4)
    if offset != OFFSETS[1]:
        return
    options["augmentation"] = []  # whose random draws have the precision of the series
    plain_outputs, moved_outputs = (
        AttentionClassifier(**options).fit(X, y)._outputs(X) for X in (plain, moved)
    )
    torch.testing.assert_close(moved_outputs, plain_outputs, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("form", ["list", "frame", "mixed", "whole numbers"])
def test_every_door_keeps_the_signal(small, form):
    import pandas as pd

    X, y = waves(12, 1e9)
    if form == "list":
        X = [case[:, : STEPS - index % 3] for index, case in enumerate(X)]
    elif form == "frame":
        X = pd.DataFrame(X[:, 0])
    elif form == "mixed":
        X = [*X[:6], *X[6:].astype(np.longdouble)]
    else:
        X = X.astype(np.int64)
    classifier = AttentionClassifier(**small, stem="linear").fit(X, y)
    assert np.ptp(classifier.decision_function(X)) > 0.01
    assert float(classifier.model_.encoder.input_std.min()) == pytest.approx(0.7, abs=0.2)


def test_gaps_far_from_zero_are_filled_in_float64(small):
    X, y = waves(12, 1e9)
    X[0, 0, 3] = np.nan
    scale = model_scale(AttentionClassifier(**small, missing="interpolate").fit(X, y).model_)
    filled = X.copy()
    filled[0, 0, 3] = (X[0, 0, 2] + X[0, 0, 4]) / 2
    np.testing.assert_allclose(scale.std, filled.std(axis=(0, 2)), rtol=1e-6)


def test_importance_sums_to_the_change_far_from_zero(small):
    X, _ = waves(12, 1e8)
    y = X[:, 0, :4].mean(axis=1)
    regressor = AttentionRegressor(**small, stem="linear", views=("raw",)).fit(X, y)
    level = model_scale(regressor.model_).mean[:, None] + np.zeros(X.shape[1:])
    change = regressor.predict(X[:1]) - regressor.predict(level[None])
    np.testing.assert_allclose(
        regressor.feature_importance(X[:1]).sum(), change, rtol=1e-2, atol=1e-3 * y.std()
    )


def test_a_warm_start_keeps_the_precision_of_the_scale(small):
    X, y = waves(12, 1e8)
    classifier = AttentionClassifier(**small, warm_start=True).fit(X, y)
    scale = model_scale(classifier.model_).mean
    classifier.fit(X, y)
    assert (model_scale(classifier.model_).mean == scale).all()
    assert classifier.model_.encoder.input_mean_rest.any() or (scale == scale.astype(np.float32)).all()


def test_weights_of_a_version_with_one_part_of_the_mean_open(small, arrays):
    """They lack the rest, which is then zero, also where the model before had one."""
    X, y = arrays[:2]
    model = AttentionClassifier(**small).fit(X, y).model_
    weights = {name: value for name, value in model.state_dict().items() if "input_mean_rest" not in name}
    assert len(weights) == len(model.state_dict()) - 1
    expected = predict_outputs(model, [case.T for case in X])
    model.encoder.input_mean_rest.fill_(3.0)
    model.load_state_dict(weights)
    assert torch.equal(predict_outputs(model, [case.T for case in X]), expected)


def test_an_estimator_that_was_pickled_with_one_part_opens(small, arrays):
    classifier = AttentionClassifier(**small).fit(*arrays[:2])
    expected = classifier.predict_proba(arrays[0])
    del classifier.model_.encoder._buffers["input_mean_rest"]
    opened = pickle.loads(pickle.dumps(classifier))
    assert (opened.predict_proba(arrays[0]) == expected).all()


def test_series_near_zero_are_float32_as_before(small, arrays):
    """Nothing is gained by more digits there, and recorded runs keep their bits."""
    X, y = arrays[0], arrays[1]
    first = AttentionClassifier(**small).fit(X, y)
    second = AttentionClassifier(**small).fit(X.astype(np.float32), y)
    assert not first.model_.encoder.input_mean_rest.any()
    assert torch.equal(first._outputs(X), second._outputs(X.astype(np.float32)))


@settings(deadline=None)
@given(
    offset=st.sampled_from([0.0, 1.0, -1e3, 1e6, -1e9, 1e12]),
    values=st.lists(st.integers(-8, 8), min_size=2, max_size=20),
)
def test_a_scale_does_not_depend_on_the_offset(offset, values):
    values = np.array(values, dtype=np.float64)[:, None]
    plain, moved = Standardizer.fit([values]), Standardizer.fit([values[:1] + offset, values[1:] + offset])
    np.testing.assert_allclose(moved.mean - offset, plain.mean, rtol=0, atol=1e-15 * abs(offset) + 1e-12)
    np.testing.assert_allclose(moved.std, plain.std, rtol=1e-4)
    np.testing.assert_allclose(moved.transform([values + offset])[0], plain.transform([values])[0], atol=1e-3)


@pytest.mark.parametrize("value", [0.1, -1e6 / 3, 1e8 / 3, 1e12 / 7])
def test_a_channel_of_rounding_errors_is_constant_in_float64_too(value):
    noise = value * (1 + np.finfo(float).eps * np.random.default_rng(0).integers(-4, 5, (50, 1)))
    for sequences in ([np.full((7, 1), value)] * 9, [noise]):
        assert Standardizer.fit(sequences).std.tolist() == [1.0]
