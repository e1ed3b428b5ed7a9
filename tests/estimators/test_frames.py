"""Frames and arrays of every kind hold the same series; missing marks, names and keys count."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier, AttentionRegressor
from kernel_attention.series import as_sequences

HIDDEN = -9999.0  # what stands behind a mask


@st.composite
def series_with_gaps(draw):
    """Whole numbers (cases, channels, time), which every type of column holds, and where they are missing."""
    shape = draw(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5)))
    values = draw(nps.arrays(np.float64, shape, elements=st.integers(-3, 3)))
    return values, draw(nps.arrays(np.bool_, shape))


def masked(values, gaps):
    return np.ma.masked_array(np.where(gaps, HIDDEN, values), gaps)


def marked(values, gaps, mark):
    """An array of objects with this mark at the gaps."""
    found = values.astype(object)
    found[gaps] = mark
    return found


def columns(values, gaps):
    """One series (time,) in every type of column that pandas has for it."""
    with_na = marked(values, gaps, pd.NA)
    yield pd.Series(np.where(gaps, np.nan, values))
    for mark in (None, np.nan, pd.NA, pd.NaT):
        yield pd.Series(marked(values, gaps, mark), dtype=object)
    for dtype in ("Int64", "Float64", "Int8", "Float32", "int64[pyarrow]", "double[pyarrow]"):
        yield pd.Series(with_na, dtype=dtype)
    yield pd.Series(np.where(gaps, np.nan, values)).astype("category")


def bodies(values, gaps):
    """The same cases in the containers that people have."""
    cases, channels, time = values.shape
    pairs = list(zip(values, gaps, strict=True))
    yield np.where(gaps, np.nan, values)
    yield torch.from_numpy(np.where(gaps, np.nan, values))
    yield masked(values, gaps)
    yield masked(values.astype(np.int32), gaps)
    yield masked(values.astype(np.float32), gaps)
    yield [masked(*pair) for pair in pairs]
    yield [[masked(*channel) for channel in zip(*pair, strict=True)] for pair in pairs]
    yield np.where(gaps, np.nan, values).tolist()
    for mark in (None, pd.NA, np.nan):
        yield marked(values, gaps, mark)
        yield marked(values, gaps, mark).tolist()
    of_lists = marked(values, gaps, None).tolist()
    yield [[[np.ma.masked if x is None else x for x in channel] for channel in case] for case in of_lists]
    index = pd.MultiIndex.from_product([range(cases), range(time)])
    flat, holes = (part.transpose(0, 2, 1).reshape(-1, channels) for part in (values, gaps))
    for forms in zip(*(columns(*pair) for pair in zip(flat.T, holes.T, strict=True)), strict=True):
        yield pd.DataFrame(dict(enumerate(forms))).set_axis(index)
    for number in range(len(list(columns(values[0, 0], gaps[0, 0])))):
        cells = [[list(columns(*channel))[number] for channel in zip(*pair, strict=True)] for pair in pairs]
        nested = pd.DataFrame(index=range(cases), columns=range(channels), dtype=object)
        for case in range(cases):
            for channel in range(channels):
                nested.iat[case, channel] = cells[case][channel]
        yield nested
    yield [pd.DataFrame(masked(*pair).filled(np.nan)).convert_dtypes() for pair in pairs]
    if channels == 1:
        wide = [list(columns(*channel)) for channel in zip(values[:, 0].T, gaps[:, 0].T, strict=True)]
        yield from (pd.DataFrame(dict(enumerate(forms))) for forms in zip(*wide, strict=True))


def attempt(call):
    try:
        return call(), None
    except ka.InputError as error:
        return None, str(error)


@settings(max_examples=8, suppress_health_check=list(HealthCheck), deadline=None)
@given(series_with_gaps())
def test_every_container_holds_the_same_series_and_the_same_gaps(drawn):
    values, gaps = drawn
    plain = np.where(gaps, np.nan, values)
    for missing in ("error", "interpolate"):
        expected, refusal = attempt(lambda: as_sequences(plain, missing))  # noqa: B023
        for form in bodies(values, gaps):
            found, error = attempt(lambda: as_sequences(form, missing))  # noqa: B023
            assert error == refusal, type(form)
            if refusal is None:
                np.testing.assert_allclose(np.stack(found), np.stack(expected), rtol=1e-6)


def test_booleans_of_every_kind_are_numbers():
    flags = pd.DataFrame({0: [True, False], 1: [False, True]})
    for dtype in ("boolean", "bool[pyarrow]", bool, object):
        assert np.stack(as_sequences(flags.astype(dtype)))[..., 0].tolist() == [[1, 0], [0, 1]]


@pytest.mark.parametrize(
    "column",
    [
        pd.Series(pd.to_datetime(["2024-01-01", "2024-01-02"])),
        pd.Series(pd.to_datetime(["2024-01-01", None])),
        pd.Series(pd.to_timedelta([1, 2], unit="D")),
        pd.Series(["a", "b"]),
        pd.Series(["a", "b"]).astype("category"),
    ],
)
def test_dates_and_words_are_no_numbers(column):
    with pytest.raises(ka.InputError, match="X is not an array of numbers"):
        as_sequences(pd.DataFrame({"x": [1.0, 2.0], "y": column}))


# Names of columns


def named_frames(X):
    """X (cases, 2, time) in frames whose columns have names: two levels, nested, and a list of frames."""
    cases, _, time = X.shape
    index = pd.MultiIndex.from_product([range(cases), range(time)])
    yield pd.DataFrame(X.transpose(0, 2, 1).reshape(-1, 2), index=index, columns=["flow", "pressure"])
    yield pd.DataFrame(
        {name: [pd.Series(case[c]) for case in X] for c, name in enumerate(["flow", "pressure"])}
    )
    yield [pd.DataFrame(case.T, columns=["flow", "pressure"]) for case in X]
    yield [pd.DataFrame(case, index=["flow", "pressure"]) for case in X]


def renamed(form, names):
    """The form with its columns in the order of these names, or with other ones."""

    def change(frame):
        is_by_rows = not isinstance(frame.columns[0], str)
        known = frame.index if is_by_rows else frame.columns
        if set(names) == set(known):
            return frame.loc[names] if is_by_rows else frame[names]
        return frame.set_axis(names, axis=0 if is_by_rows else 1)

    return [change(frame) for frame in form] if isinstance(form, list) else change(form)


@pytest.mark.parametrize(
    ("kind", "estimator"),
    [
        (0, "AttentionClassifier"),
        (1, "AttentionRegressor"),
        (2, "AttentionClassifier"),
        (3, "AttentionRegressor"),
    ],
    ids=["two levels", "nested", "frames", "frames of aeon"],
    indirect=["estimator"],
)
def test_columns_in_another_order_or_of_other_names_are_refused(estimator, arrays, kind, tmp_path):
    X = arrays[0][:, :2]
    y = arrays[1] if isinstance(estimator, AttentionClassifier) else arrays[2]
    form = list(named_frames(X))[kind]
    with pytest.raises(ka.InputError, match="The feature names should match"):
        estimator.fit(form, y, validation_data=(renamed(form, ["pressure", "flow"]), y))
    assert not hasattr(estimator, "feature_names_in_")
    estimator.fit(form, y)
    assert estimator.feature_names_in_.tolist() == ["flow", "pressure"]
    expected = estimator.predict(form)
    assert (estimator.predict(X) == expected).all()  # an array has no names to compare
    estimator.save(tmp_path / "estimator")
    for fitted in (estimator, type(estimator).load(tmp_path / "estimator")):
        for names, words in (
            (["pressure", "flow"], "the same order as in fit"),
            (["flow", "heat"], "unseen at fit time: 'heat'.*now missing: 'pressure'"),
        ):
            for method in (fitted.predict, fitted.transform, fitted.feature_importance):
                with pytest.raises(ka.InputError, match=f"The feature names should match.*{words}"):
                    method(renamed(form, names))
    estimator.set_params(warm_start=True)
    with pytest.raises(ka.InputError, match="The feature names should match"):
        estimator.fit(renamed(form, ["pressure", "flow"]), y)
    estimator.fit(X, y)
    assert estimator.feature_names_in_.tolist() == ["flow", "pressure"]
    estimator.set_params(warm_start=False).fit(X, y)
    assert not hasattr(estimator, "feature_names_in_")


def test_the_names_of_the_steps_of_a_wide_frame_count(estimator, arrays):
    X, y = arrays[0][:, 0], arrays[1] if isinstance(estimator, AttentionClassifier) else arrays[2]
    frame = pd.DataFrame(X, columns=[f"t{step}" for step in range(7)])
    estimator.fit(frame, y)
    with pytest.raises(ka.InputError, match="The feature names should match"):
        estimator.predict(frame[frame.columns[::-1]])


def test_frames_of_a_list_agree_on_their_names(small, arrays):
    frames = list(named_frames(arrays[0][:, :2]))[2]
    frames[3] = frames[3][["pressure", "flow"]]
    with pytest.raises(
        ka.InputError, match=r"case 3 of X has the channels \['pressure', 'flow'\], a case before"
    ):
        AttentionClassifier(**small).fit(frames, arrays[1])


def test_names_of_which_some_are_text_are_refused(small, arrays):
    frame = pd.DataFrame(arrays[0][:, 0]).rename(columns={0: "first"})
    with pytest.raises(ka.InputError, match="must be all text or none of them; there are int, str"):
        AttentionClassifier(**small).fit(frame, arrays[1])


# Keys of two levels


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize(
    "keys",
    [
        [0.0, 1.0, np.nan, 3.0],
        pd.to_datetime(["2024-01-01", "2024-01-02", None, "2024-01-03"]),
        pd.array([0, 1, None, 3], dtype="Int64"),
        ["a", "b", None, "c"],
        pd.Categorical(["a", "b", None, "c"]),
    ],
)
def test_a_row_without_a_case_or_a_time_is_refused(keys, level):
    levels = [["a", "a", "b", "b"], [0, 1, 0, 1]]
    levels[level] = keys
    frame = pd.DataFrame(
        {"u": np.arange(4.0)}, index=pd.MultiIndex.from_arrays(levels, names=["case", "time"])
    )
    word = ("case", "time")[level]
    with pytest.raises(
        ka.InputError, match=f"row 2 of X has no {word}: level {level} of its index \\('{word}'\\)"
    ):
        as_sequences(frame)


def test_cases_keep_the_order_in_which_they_appear_and_their_rows_may_be_apart():
    index = pd.MultiIndex.from_tuples([("b", 1), ("a", 5), ("b", 0), ("a", 4)])
    found = as_sequences(pd.DataFrame({"u": [1.0, 2.0, 3.0, 4.0]}, index=index))
    assert [sequence[:, 0].tolist() for sequence in found] == [[3, 1], [4, 2]]
    cases = pd.Categorical(["a", "a", "b"], categories=["c", "b", "a"])
    frame = pd.DataFrame({"u": [1.0, 2.0, 3.0]}, index=pd.MultiIndex.from_arrays([cases, [0, 1, 0]]))
    assert [sequence[:, 0].tolist() for sequence in as_sequences(frame)] == [[1, 2], [3]]


def test_times_without_an_order_are_refused():
    index = pd.MultiIndex.from_arrays([["a", "a"], pd.Index([1, "late"], dtype=object)])
    with pytest.raises(ka.InputError, match="case a of X has times that cannot be sorted together"):
        as_sequences(pd.DataFrame({"u": [1.0, 2.0]}, index=index))


# Labels, targets and weights


@pytest.mark.parametrize(
    ("labels", "kind"),
    [
        (pd.Series([1, 2], dtype="Int64"), "i"),
        (pd.Series([1, 2], dtype="int64[pyarrow]"), "i"),
        (pd.array([1, 2], dtype="UInt8"), "u"),
        (pd.Series([True, False], dtype="boolean"), "b"),
        (pd.Series([True, False], dtype="bool[pyarrow]"), "b"),
        (pd.Series([2**60, 2**60 + 1], dtype="Int64"), "i"),
        (pd.Series([2**60, 2**60 + 1]).astype("category"), "i"),
        (pd.Series([0.0, 1.0], dtype="Float64"), "f"),
        (pd.Series(["a", "b"], dtype="string"), "O"),
        (pd.Series(["a", "b"]).astype("category"), "O"),
        (np.ma.masked_array([1, 2]), "i"),
    ],
)
def test_labels_stay_what_they_are(labels, kind, small, arrays, tmp_path):
    y = labels.take(np.arange(23) % 2)
    classifier = AttentionClassifier(**small).fit(arrays[0], y)
    assert classifier.classes_.dtype.kind == kind
    assert classifier.classes_.tolist() == sorted(labels.tolist())
    classifier.save(tmp_path / "classifier")
    loaded = AttentionClassifier.load(tmp_path / "classifier")
    assert loaded.predict(arrays[0]).tolist() == classifier.predict(arrays[0]).tolist()
    assert loaded.classes_.dtype == classifier.classes_.dtype


def missing_in_row(values, row, *, of_text=False):
    """Targets with nothing in one row, in the marks of every container."""
    for mark in (None, np.nan, pd.NA, pd.NaT):
        found = np.array(values, dtype=object)
        found[row] = mark
        yield found
        yield found.tolist()
        yield pd.Series(found, dtype=object)
    found[row] = None
    yield pd.Series(found, dtype="string" if of_text else "Float64")
    yield pd.Series(found).astype("category")
    yield np.ma.masked_array(values, np.arange(len(values)) == row)


@pytest.mark.parametrize("number", range(15))
def test_a_missing_target_is_refused_with_its_row(estimator, arrays, number):
    is_classifier = isinstance(estimator, AttentionClassifier)
    y = arrays[1] if is_classifier else arrays[2]
    with pytest.raises(ka.InputError, match="Input y contains NaN: the value of row 4 is missing"):
        estimator.fit(arrays[0], list(missing_in_row(y, 4, of_text=is_classifier))[number])


def test_a_missing_weight_is_refused_with_its_row(estimator, arrays):
    y = arrays[1] if isinstance(estimator, AttentionClassifier) else arrays[2]
    for weights in (
        np.ma.masked_array(np.ones(23), np.arange(23) == 4),
        pd.array([1] * 4 + [None] + [1] * 18),
    ):
        with pytest.raises(ka.InputError, match="Input sample_weight contains NaN: the value of row 4"):
            estimator.fit(arrays[0], y, sample_weight=weights)


def test_dates_are_no_targets_of_a_regression(small, arrays):
    with pytest.raises(ka.InputError, match=r"y: datetime64\[D\] is not accepted"):
        AttentionRegressor(**small).fit(arrays[0], np.arange(23).astype("datetime64[D]"))
