"""Whatever is given as series and targets: an answer that can be used, or an error of one line."""

from __future__ import annotations

import datetime
import warnings

import numpy as np
import pandas as pd
import pytest
import scipy.sparse
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.series import as_sequences

QUICK = {
    "attention": "softmax", "embed_dim": 4, "num_heads": 2, "num_layers": 1, "feedforward_dim": 4,
    "epochs": 1, "stem": "linear", "n_estimators": 1, "calibrate": False, "random_state": 0,
    "accelerator": "cpu",
}  # fmt: skip

KINDS = ["f2", "f4", "f8", "i1", "i8", "u2", "?", "c8", "M8[s]", "m8[s]", "U3", "S2", "O"]
numbers = st.one_of(st.floats(), st.floats(-3, 3), st.integers(), st.booleans())
atoms = st.one_of(
    numbers, st.none(), st.text(max_size=2), st.binary(max_size=2), st.dates(), st.complex_numbers()
)


def arrays(dtypes=KINDS, most_dims=4):
    """Arrays of any type and of zero to four axes, some of them empty."""
    shapes = nps.array_shapes(min_dims=0, max_dims=most_dims, min_side=0, max_side=3)
    return st.sampled_from(dtypes).flatmap(
        lambda dtype: nps.arrays(np.dtype(dtype), shapes, elements=atoms if dtype == "O" else None)
    )


def well_formed():
    """Series as they should be: (cases, channels, time) of moderate numbers."""
    shapes = st.tuples(st.integers(2, 5), st.integers(1, 2), st.integers(1, 4))
    return nps.arrays(np.float64, shapes, elements=st.floats(-9, 9))


def forms(array):
    """The same numbers in the forms that people have."""
    columns = array.shape[1]
    yield array
    yield array.tolist()
    yield list(array)
    yield torch.from_numpy(array).requires_grad_()
    yield np.ma.masked_array(array)
    yield pd.DataFrame({f"c{c}": [pd.Series(case[c]) for case in array] for c in range(columns)})
    yield pd.concat({case: pd.DataFrame(series.T) for case, series in enumerate(array)})
    yield [pd.DataFrame(series) for series in array]
    yield [series[:, : 1 + case % array.shape[2]] for case, series in enumerate(array)]
    yield pd.DataFrame(array[:, 0])
    yield pd.DataFrame(array[:, 0]).convert_dtypes()
    yield scipy.sparse.csr_array(array[:, 0])
    yield (series for series in array)
    yield dict(enumerate(array))
    yield pd.Series(list(array[:, 0]))


series = st.one_of(
    well_formed(),
    well_formed().flatmap(lambda array: st.sampled_from(list(forms(array)))),
    arrays(),
    st.lists(arrays(most_dims=3), max_size=4),
    st.recursive(atoms, lambda inner: st.lists(inner, max_size=3), max_leaves=12),
)


def attempt(call):
    """What a call returns, or None with the error that it raises, without the warnings of other libraries."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return call(), None
        except Exception as error:
            return None, error


def is_one_line(error):
    """Whether a user can act on it: an InputError of one line."""
    return isinstance(error, ka.InputError) and bool(str(error)) and "\n" not in str(error)


@settings(max_examples=100, suppress_health_check=list(HealthCheck))
@given(X=series, missing=st.sampled_from(["error", "interpolate"]))
def test_series_become_finite_arrays_or_are_refused(X, missing):
    sequences, error = attempt(lambda: as_sequences(X, missing))
    if error is not None:
        assert is_one_line(error), repr(error)
        return
    assert sequences
    for sequence in sequences:
        assert sequence.dtype == sequences[0].dtype
        assert sequence.dtype in (np.float32, np.float64)
        assert np.abs(sequence).max() <= np.finfo(np.float32).max
        assert sequence.ndim == 2
        assert sequence.size
        assert sequence.shape[1] == sequences[0].shape[1]
        assert np.isfinite(sequence).all()


days = st.sampled_from([datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)])
entries = [
    st.sampled_from(["a", "b"]), st.booleans(), st.integers(-2, 2), st.floats(-9, 9), atoms, days,
    st.floats(),
]  # fmt: skip
target_forms = [
    lambda y: y,
    np.array,
    lambda y: np.array(y, dtype=object),
    pd.Series,
    lambda y: pd.Series(y).convert_dtypes(),
    pd.Categorical,
    lambda y: [[entry, entry] for entry in y],
    dict.fromkeys,
    iter,
    lambda y: None,
    lambda y: np.array([y, y]),
]


@pytest.mark.parametrize("kind", [AttentionClassifier, AttentionRegressor])
@settings(max_examples=20, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_targets_are_learnt_or_refused(kind, data):
    X = data.draw(well_formed())
    size = len(X) + data.draw(st.sampled_from([0, 0, 0, 1]))
    y = data.draw(st.one_of(*(st.lists(each, min_size=size, max_size=size) for each in entries)))
    y, error = attempt(lambda: data.draw(st.sampled_from(target_forms))(y))
    if error is not None:
        return  # NumPy or pandas refuses it before we see it
    estimator = kind(**QUICK)
    predicted, error = attempt(lambda: estimator.fit(X, y).predict(X))
    if error is not None:
        assert is_one_line(error), repr(error)
        assert not hasattr(estimator, "models_")
    elif kind is AttentionClassifier:
        assert set(predicted.tolist()) <= set(estimator.classes_.tolist())
        assert np.isfinite(estimator.predict_proba(X)).all()
    else:
        assert np.isfinite(predicted).all()
        assert predicted.shape == np.shape(y)


# Each was another error, of several lines or of no use, or an answer that is none.
@pytest.mark.parametrize(
    ("y", "message"),
    [
        (pd.Series([None, "a", "b"]).convert_dtypes(), "Input y contains NaN: the value of row 0 is missing"),
        (np.array(["a", 1, "a"], dtype=object), r"types that cannot be sorted together \(int, str\)"),
        ([b"a", b"b", b"a"], "labels represented as bytes is not supported"),
        ([1j, 2, 1j], "y: Complex data not supported"),
    ],
)
def test_labels_that_are_none_are_refused(y, message):
    with pytest.raises(ka.InputError, match=message) as caught:
        AttentionClassifier(**QUICK).fit(np.zeros((3, 1, 4)), y)
    assert is_one_line(caught.value)


@pytest.mark.parametrize(
    ("y", "message"),
    [
        ([1e308, -1e308, 0.0], r"y has a value of size 1e\+308; accepted: up to 1e\+150"),
        ({1: 1, 2: 2, 3: 3}, "y: .*not 'dict'"),
        (iter([1, 2, 3]), "y: .*iterator"),
        ([datetime.date(2024, 1, 1)] * 3, r"y: .*not 'datetime.date'"),
        ([1j, 2, 1j], "y: .*complex"),
        (None, "requires y to be passed, but the target y is None"),
    ],
)
def test_values_that_are_none_are_refused(y, message):
    with pytest.raises(ka.InputError, match=message) as caught:
        AttentionRegressor(**QUICK).fit(np.zeros((3, 1, 4)), y)
    assert is_one_line(caught.value)


@pytest.mark.parametrize("kind", [AttentionClassifier, AttentionRegressor])
@pytest.mark.parametrize(
    ("parameters", "arguments", "message"),
    [
        ({"time_limit": "long"}, {}, "time_limit='long' must be a finite number of at least 0"),
        ({"time_limit": np.nan}, {}, "time_limit=nan must be"),
        ({"max_len": 10**30}, {}, r"max_len=10+ would take about .*lower max_len"),
        ({"patch_len": 10**30}, {}, r"patch_len=10+ would take about .*lower patch_len"),
        ({}, {"sample_weight": {}}, "sample_weight: .*not 'dict'"),
        ({}, {"validation_data": 3}, r"validation_data must be a pair \(X, y\)"),
        ({}, {"validation_data": ([], [], [])}, r"validation_data must be a pair \(X, y\)"),
    ],
)
def test_parameters_and_arguments_of_other_kinds_are_refused(kind, parameters, arguments, message):
    X, y = np.random.default_rng(0).normal(size=(4, 1, 4)), [0, 1, 0, 1]
    estimator = kind(**QUICK | parameters)
    with pytest.raises(ka.InputError, match=message) as caught:
        estimator.fit(X, y, **arguments)
    assert is_one_line(caught.value)
    assert not hasattr(estimator, "models_")
