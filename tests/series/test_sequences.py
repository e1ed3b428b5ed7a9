"""Arrays in aeon's conventions become (time, channels) in their precision, or hear in one line why not."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention.series import as_sequences

X = np.arange(2 * 3 * 5, dtype=np.float64).reshape(2, 3, 5)  # (cases, channels, time)


@pytest.mark.parametrize(
    "given_as",
    [
        X,
        X.astype(np.int16),
        X.astype(np.float16),
        list(X),
        X.tolist(),
        torch.from_numpy(X),
        tuple(X),
        X.astype(object),
    ],
    ids=["float64", "int16", "float16", "list", "nested lists", "torch", "tuple", "object"],
)
def test_cases_channels_time_becomes_time_by_channels(given_as):
    sequences = as_sequences(given_as)
    precision = np.float32 if getattr(given_as, "dtype", None) in (np.int16, np.float16) else np.float64
    assert all(sequence.dtype == precision and sequence.flags.c_contiguous for sequence in sequences)
    np.testing.assert_array_equal(np.stack(sequences), X.transpose(0, 2, 1))


@pytest.mark.parametrize("given_as", [X[:, 0], list(X[:, 0]), X[:, 0].tolist()])
def test_two_dimensions_are_cases_by_time_of_one_channel(given_as):
    np.testing.assert_array_equal(np.stack(as_sequences(given_as)), X[:, 0, :, None])


def test_lists_may_hold_series_of_different_lengths():
    ragged = [X[0, :, :2], X[1]]
    boxed = np.empty(2, dtype=object)
    boxed[:] = ragged
    for given_as in (ragged, boxed):
        assert [sequence.shape for sequence in as_sequences(given_as)] == [(2, 3), (5, 3)]


def test_the_input_is_left_alone():
    gaps = X.copy()
    gaps[0, 0, 2] = np.nan
    before = gaps.copy()
    as_sequences(gaps, missing="interpolate")
    np.testing.assert_array_equal(gaps, before)


class _Sparse:
    def tocsr(self):
        raise AssertionError


REFUSED = {
    "no cases": (np.zeros((0, 2, 3)), "X has 0 cases"),
    "no cases in a list": ([], "X has 0 cases"),
    "no steps": (np.zeros((2, 3, 0)), "case 0 of X has 0 time steps and 3 channels"),
    "one series without steps": ([np.ones((2, 3)), np.ones((2, 0))], "case 1 of X has 0 time steps"),
    "no channels": (np.zeros((2, 0, 3)), "case 0 of X has 3 time steps and 0 channels"),
    "channels differ": ([np.ones((2, 3)), np.ones((3, 3))], "case 1 of X has 3 channels, case 0 has 2"),
    "one dimension": (np.ones(3), r"X has shape \(3,\); accepted: .*Reshape your data"),
    "four dimensions": (np.ones((1, 1, 1, 1)), r"X has shape \(1, 1, 1, 1\); accepted: "),
    "three dimensions a case": ([np.ones((1, 1, 1))], r"case 0 of X has shape \(1, 1, 1\); accepted: "),
    "numbers in a list": ([1.0, 2.0], r"case 0 of X has shape \(\); accepted: "),
    "complex": (X + 1j, "Complex data not supported"),
    "text": (np.array([["a", "b"]]), "X is not an array of numbers"),
    "digits as text": (np.array([["1", "2"]]), "X is not an array of numbers"),
    "dates": (np.array([["2020-01-01"]], dtype="datetime64[D]"), "X is not an array of numbers"),
    "objects": (np.array([[{}, {}]], dtype=object), "X is not an array of numbers"),
    "ragged channels": ([[[1.0, 2.0], [1.0]]], "case 0 of X is not an array of numbers"),
    "nothing": (None, r"X has shape \(\); accepted: "),
    "sparse": (_Sparse(), "sparse input is not supported"),
    "infinite": (np.array([[1.0, -np.inf]]), "infinite value in case 0, channel 0, step 1 of X"),
    "beyond float32": (np.array([[1.0, 1e39]]), "infinite value in case 0, channel 0, step 1 of X"),
    "missing": (
        np.array([[1.0, 2.0], [1.0, np.nan]]),
        r"missing value \(NaN\) in case 1, channel 0, step 1 of X",
    ),
}


@pytest.mark.parametrize(("values", "what"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_no_collection_of_series_is_refused(values, what):
    with pytest.raises(InputError, match=what) as error:
        as_sequences(values)
    assert "\n" not in str(error.value)


def test_a_channel_without_any_value_cannot_be_interpolated():
    values = X.copy()
    values[1, 2] = np.nan
    with pytest.raises(InputError, match="case 1, channel 2 of X"):
        as_sequences(values, missing="interpolate")


@given(
    length=st.integers(2, 11), slope=st.floats(-3, 3, width=32), gaps=st.sets(st.integers(1, 9), max_size=9)
)
def test_interpolation_restores_a_straight_line_between_known_ends(length, slope, gaps):
    line = np.float32(slope) * np.arange(length, dtype=np.float32)
    holed = np.where(np.isin(np.arange(length), list(gaps - {length - 1})), np.nan, line)
    np.testing.assert_allclose(as_sequences([holed], "interpolate")[0][:, 0], line, atol=1e-5)


@given(head=st.integers(0, 4), tail=st.integers(0, 4))
def test_beyond_the_last_known_value_it_is_continued(head, tail):
    holed = [np.nan] * head + [2.0, 5.0] + [np.nan] * tail
    filled = as_sequences([np.array(holed)], "interpolate")[0][:, 0]
    assert filled.tolist() == [2.0] * (head + 1) + [5.0] * (tail + 1)
