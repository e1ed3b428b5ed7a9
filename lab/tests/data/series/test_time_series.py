"""The scale comes from the training steps alone, and a held-out part is fair, disjoint and repeatable."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention.series import SequenceSplit, Standardizer, stratified_split


def numbered(targets):
    """A split whose sequences carry their own index."""
    targets = np.asarray(targets)
    return SequenceSplit([np.full((1, 1), i, np.float32) for i in range(len(targets))], targets)


def indices(split):
    return [int(sequence[0, 0]) for sequence in split.sequences]


def test_standardised_training_steps_have_mean_0_and_deviation_1_in_each_channel():
    generator = np.random.default_rng(0)
    sequences = [
        (generator.normal(size=(n, 3)) * [1, 50, 0.01] + [0, 1e3, -7]).astype(np.float32)
        for n in (5, 11, 2, 30)
    ]
    scaled = np.concatenate(Standardizer.fit(sequences).transform(sequences))
    assert scaled.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-5)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-5)


@pytest.mark.parametrize("value", [0.0, 0.1, -1e6, 1e-8, 3e7])
def test_a_constant_channel_becomes_zero(value):
    sequences = [np.full((n, 1), value, np.float32) for n in (7, 13)]
    standardizer = Standardizer.fit(sequences)
    assert standardizer.std.tolist() == [1.0]
    assert max(np.abs(scaled).max() for scaled in standardizer.transform(sequences)) <= 1e-6


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda: Standardizer.fit([]), "sequences is empty"),
        (lambda: Standardizer([0.0], [1.0, 1.0]), "one shape"),
        (lambda: Standardizer([0.0], [0.0]), "std positive"),
        (lambda: Standardizer([np.nan], [1.0]), "finite"),
        (
            lambda: Standardizer([0, 0], [1, 1]).transform([np.ones((4, 3))]),
            "case 0 has 3 channels.*fitted on 2",
        ),
    ],
)
def test_a_scale_that_cannot_be_is_refused(call, what):
    with pytest.raises(InputError, match=what):
        call()


@given(
    targets=st.lists(st.integers(0, 6), min_size=2, max_size=80).filter(lambda t: len(set(t)) < len(t)),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32),
)
def test_a_stratified_split_divides_and_keeps_every_class_on_both_sides(targets, fraction, seed):
    split = numbered(targets)
    rest, held_out = stratified_split(split, fraction, seed, "classification")
    assert sorted(indices(rest) + indices(held_out)) == list(range(len(targets)))
    assert indices(rest) == sorted(indices(rest))
    assert indices(held_out) == sorted(indices(held_out))
    for part in (rest, held_out):
        np.testing.assert_array_equal(part.targets, split.targets[indices(part)])
    for label in set(targets):
        size, count = targets.count(label), int((held_out.targets == label).sum())
        assert 1 <= count <= size - 1 if size >= 2 else count == 0
        assert max(min(size - 1, 1), np.floor(fraction * size) - 1) <= count <= fraction * size + 1
    again = stratified_split(split, fraction, seed, "classification")
    assert indices(again[1]) == indices(held_out)


@given(sizes=st.lists(st.integers(10, 30), min_size=1, max_size=6), fraction=st.floats(0.1, 0.9))
def test_with_classes_of_ten_or_more_the_held_out_size_is_the_fraction_rounded(sizes, fraction):
    targets = np.repeat(np.arange(len(sizes)), sizes)
    _, held_out = stratified_split(numbered(targets), fraction, 0, "classification")
    assert len(held_out) == round(fraction * len(targets))


@given(
    targets=st.lists(st.floats(-5, 5), min_size=2, max_size=60),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_a_regression_split_divides_and_draws_from_every_range_of_the_target(targets, fraction, seed):
    split = numbered(targets)
    rest, held_out = stratified_split(split, fraction, seed, "regression")
    assert sorted(indices(rest) + indices(held_out)) == list(range(len(targets)))
    assert len(held_out) == min(max(round(fraction * len(targets)), 1), len(targets) - 1)
    ranges = np.array_split(np.sort(np.asarray(targets)), len(held_out))
    for value, interval in zip(np.sort(held_out.targets), ranges, strict=True):
        assert interval[0] <= value <= interval[-1]


def test_seeds_draw_different_parts_and_no_global_generator():
    split = numbered([0] * 30 + [1] * 30)
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    parts = {tuple(indices(stratified_split(split, 0.2, seed, "classification")[1])) for seed in range(5)}
    assert len(parts) == 5
    assert (np.random.get_state()[1] == before).all()


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (([0, 0, 1, 1], 0.0, 0, "classification"), "fraction 0.0 must lie between 0 and 1"),
        (([0, 0, 1, 1], 1, 0, "classification"), "fraction 1 must lie between"),
        (([0, 0, 1, 1], float("nan"), 0, "classification"), "fraction nan"),
        (([0, 0, 1, 1], 0.5, -1, "classification"), "seed -1"),
        (([0, 0, 1, 1], 0.5, 0, "clustering"), "unknown task 'clustering'"),
        (([0, 1, 2], 0.5, 0, "classification"), "no class has two cases"),
        (([0.5], 0.5, 0, "regression"), "at least two cases are needed"),
        (([], 0.5, 0, "classification"), "cannot hold out 0.5 of 0 cases"),
    ],
)
def test_a_split_that_cannot_be_is_refused(arguments, what):
    targets, *others = arguments
    with pytest.raises(InputError, match=what):
        stratified_split(numbered(targets), *others)


def test_a_small_signal_is_no_constant():
    sequences = [np.array([[1e-9], [2e-9]], np.float32)]
    np.testing.assert_allclose(Standardizer.fit(sequences).transform(sequences)[0], [[-1], [1]], atol=1e-5)
