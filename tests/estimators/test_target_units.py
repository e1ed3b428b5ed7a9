"""The units of a regressor's targets: any size, constant ones, and those of a continued fit."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernel_attention as ka
from kernel_attention.estimators import AttentionRegressor
from kernel_attention.estimators.regressor import _units

SIZES = [1e-320, 1e-300, 1e-162, 1e-30, 1.0, 1e30, 1e149]


@given(
    st.lists(st.integers(-999, 999), min_size=1, max_size=9).map(lambda values: np.array(values) / 999),
    st.sampled_from(SIZES[1:]),
    st.sampled_from([0.0, 1.0, 1e6]),
)
def test_units_scale_with_the_targets(y, size, offset):
    y = y + offset
    mean, scale = _units(y)
    grown_mean, grown_scale = _units(y * size)
    # Rounding of the offset targets, 1e-10, is relative to a spread of 1e-4.
    np.testing.assert_allclose(
        [grown_mean, grown_scale], [mean * size, scale * size], rtol=1e-5, atol=1e-9 * size
    )
    np.testing.assert_allclose([mean, scale], [y.mean(), y.std()], rtol=1e-9, atol=1e-9)


@settings(deadline=None, max_examples=10)
@given(st.one_of(st.floats(-1e150, 1e150), st.integers(-9, 9).map(float)))
def test_a_constant_target_is_exactly_its_mean(value):
    mean, scale = _units(np.full((7, 2), value))
    assert mean.tolist() == [value] * 2
    assert scale.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("value", [0.1, 1e9, -1e-300, "1.5"])
def test_a_constant_target_is_predicted_as_itself(small, arrays, value, tmp_path):
    regressor = AttentionRegressor(**small).fit(arrays[0], np.full(23, value))
    assert regressor.target_scale_ == 0.0
    regressor.save(tmp_path / "regressor")
    for fitted in (regressor, AttentionRegressor.load(tmp_path / "regressor")):
        assert (fitted.predict(arrays[0]) == float(value)).all()
    assert not np.any(regressor.feature_importance(arrays[0][:1]))


def test_of_several_targets_the_constant_one_is_predicted_as_itself(small, arrays):
    y = np.stack([arrays[2], np.full(23, 0.1)], axis=1)
    regressor = AttentionRegressor(**small | {"calibrate": True}).fit(arrays[0], y)
    predicted = regressor.predict(arrays[0])
    assert (predicted[:, 1] == 0.1).all()
    assert np.ptp(predicted[:, 0]) > 0
    assert (regressor.predict_interval(arrays[0], 0.5)[:, 1] == 0.1).all()


def test_a_constant_target_has_no_unit_that_a_continued_fit_would_keep(small, arrays):
    regressor = AttentionRegressor(**small | {"warm_start": True}).fit(arrays[0], np.full(23, 5.0))
    regressor.fit(arrays[0], arrays[2])
    assert regressor.target_scale_ == pytest.approx(arrays[2].std())


@pytest.mark.parametrize("size", SIZES)
def test_predictions_are_of_the_size_of_the_targets(small, arrays, size):
    y = (arrays[2] - 100) * size
    if size == 1e149:
        y = y / np.abs(y).max() * size
    predicted = AttentionRegressor(**small).fit(arrays[0], y).predict(arrays[0])
    assert np.abs(predicted - y.mean()).max() <= 9 * np.ptp(y)


def test_a_target_that_float32_cannot_hold_in_these_units_is_refused(small, arrays):
    y = arrays[2] * 1e-300
    held_out = (arrays[0][:2], [0.0, 1e9])
    with pytest.raises(
        ka.InputError, match=r"the target 1000000000\.0 of row 1 is too far from the training"
    ):
        AttentionRegressor(**small).fit(arrays[0], y, validation_data=held_out)
