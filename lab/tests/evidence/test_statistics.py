"""Paired tests against known values, and in simulation: the tests' size and the interval's coverage."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, norm, rankdata, wilcoxon

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.statistics import (
    figure_test,
    holm,
    paired_bootstrap,
    sign_flip_test,
    signed_rank_test,
)
from kernel_attention_lab.packing import pack_bits, pack_levels, unpack_bits, unpack_levels


def discordant(only_first: int, only_second: int, both: int = 9, none: int = 4):
    """Two models' bits with these numbers of cases."""
    counts = (only_first, only_second, both, none)
    return np.repeat([True, False, True, False], counts), np.repeat([False, True, True, False], counts)


@given(st.lists(st.booleans(), min_size=1, max_size=70))
def test_bits_come_back(correct):
    text = pack_bits(np.array(correct))
    assert len(text) == 2 * -(-len(correct) // 8)
    np.testing.assert_array_equal(unpack_bits(text, len(correct)), correct)


def test_bits_are_written_from_the_highest():
    assert pack_bits(np.array([1, 0, 0, 0, 0, 0, 0, 1, 1])) == "8180"


@pytest.mark.parametrize(
    ("text", "cases"), [("ff", 9), ("ff00", 8), ("ff", 7), ("fg", 8), ("f", 8), (None, 8), ("", 1)]
)
def test_bits_of_another_number_of_cases_are_refused(text, cases):
    with pytest.raises(InputError, match="bits"):
        unpack_bits(text, cases)


@given(st.lists(st.integers(0, 63), max_size=70))
def test_levels_come_back(levels):
    text = pack_levels(np.array(levels, dtype=np.int64))
    assert len(text) == len(levels)
    assert unpack_levels(text, len(levels)).tolist() == levels


def test_levels_are_characters_in_order():
    assert pack_levels(np.array([0, 25, 26, 52, 62, 63])) == "AZa0+/"


@pytest.mark.parametrize(("text", "cases"), [("AB", 3), ("ABC", 2), ("A-", 2), (None, 1), (["A"], 1)])
def test_levels_of_other_cases_are_refused(text, cases):
    with pytest.raises(InputError, match="levels"):
        unpack_levels(text, cases)


def test_mcnemar_of_the_textbook_table():
    """Agresti, Categorical Data Analysis, table 10.1: of 1600 voters 150 changed one way, 86 the other."""
    found = sign_flip_test(*discordant(150, 86, both=794, none=570))
    assert found == pytest.approx(binomtest(86, 236).pvalue, rel=1e-12)
    assert found == pytest.approx(3.7e-5, rel=0.02)


@given(st.integers(0, 40), st.integers(0, 40))
def test_mcnemar_is_the_binomial_test(only_first, only_second):
    total = only_first + only_second
    expected = binomtest(only_first, total).pvalue if total else 1.0
    found = sign_flip_test(*discordant(only_first, only_second))
    assert found == pytest.approx(expected, rel=1e-12)  # sums of at most 81 products, 2^-53 each


@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 9))
def test_the_sign_flip_test_counts_all_flips(seed, rows, cases):
    first, second = np.random.default_rng(seed).random((2, rows, cases)) < 0.5
    steps = (first.astype(int) - second).sum(axis=0)
    totals = [abs(np.dot(signs, steps)) for signs in itertools.product((-1, 1), repeat=cases)]
    expected = np.mean([total >= abs(steps.sum()) for total in totals])
    assert sign_flip_test(first, second) == pytest.approx(expected, abs=1e-15 * 2**cases)
    assert sign_flip_test(second, first) == sign_flip_test(first, second)


def test_repeating_a_seed_is_no_evidence():
    """The same bits in every row give the p value of one row; pooled counts would make them significant."""
    first, second = discordant(9, 3)
    once = sign_flip_test(first, second)
    assert sign_flip_test(np.stack([first] * 5), np.stack([second] * 5)) == pytest.approx(once, rel=1e-12)
    assert sign_flip_test(np.tile(first, 5), np.tile(second, 5)) < 0.01 < 0.1 < once


def test_the_signed_rank_test_of_the_textbook():
    """Darwin's maize (Fisher 1935): 15 pairs, rank sum of the negative differences 24."""
    maize = [6.1, -8.4, 1.0, 2.0, 0.7, 2.9, 3.5, 5.1, 1.8, 3.6, 7.0, 3.0, 9.3, 7.5, -6.0]
    assert signed_rank_test(maize) == pytest.approx(wilcoxon(maize, method="exact").pvalue, rel=1e-12)
    assert signed_rank_test([1.0, 2.0, 3.0, 4.0, 5.0, 6.0]) == 2 / 2**6
    assert signed_rank_test([0.0, 0.0]) == signed_rank_test([]) == 1.0
    assert signed_rank_test([0.1 + 0.2, -0.3]) == 1.0, "a tie but for rounding"


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=9))
def test_the_signed_rank_test_counts_all_signs(differences):
    values = np.array([value for value in differences if value], dtype=float)
    ranks = rankdata(np.abs(values))
    observed = abs(np.sum(np.sign(values) * ranks))
    sums = [abs(np.sum(ranks * signs)) for signs in itertools.product((-1, 1), repeat=len(values))]
    expected = np.mean([each >= observed for each in sums])
    assert signed_rank_test(differences) == pytest.approx(expected, abs=1e-12)


def test_differences_that_are_no_numbers():
    with pytest.raises(InputError, match="finite"):
        signed_rank_test([0.5, float("nan")])


def simulated(generator, seeds, cases, effect=0.0):
    """Bits of two models on cases of varying difficulty; the second is right more often by ``effect``."""
    hard = generator.uniform(0.2, 0.8, cases)
    return generator.random((seeds, cases)) < hard, generator.random((seeds, cases)) < hard + effect


def test_the_size_of_the_tests():
    """Equal models are told apart in at most 5 % of experiments, within three deviations of their number."""
    generator = np.random.default_rng(0)
    pairs = [simulated(generator, seeds=3, cases=60) for _ in range(600)]
    allowed = 0.05 + 3 * np.sqrt(0.05 * 0.95 / 600)
    assert np.mean([sign_flip_test(*pair) <= 0.05 for pair in pairs]) <= allowed
    assert np.mean([sign_flip_test(a[0], b[0]) <= 0.05 for a, b in pairs]) <= allowed


def test_the_power_of_the_test():
    """A difference of .15 is seen: its total over 3 x 120 cases is 54, its deviation at most 13."""
    generator = np.random.default_rng(0)
    found = [sign_flip_test(*simulated(generator, 3, 120, effect=0.15)) <= 0.05 for _ in range(100)]
    assert np.mean(found) > 0.9


@pytest.mark.parametrize("seeds", [1, 6])
def test_the_coverage_of_the_interval(seeds):
    """Of one seed 95 %, within three deviations of 400 experiments; of several at least that."""
    generator = np.random.default_rng(0)
    covered = []
    for experiment in range(400):
        second, first = simulated(generator, seeds, cases=150, effect=0.1)
        interval = paired_bootstrap(first, second, resamples=500, seed=experiment)
        covered.append(interval.low <= 0.1 <= interval.high)
    deviation = np.sqrt(0.05 * 0.95 / 400)
    assert np.mean(covered) >= 0.95 - 3 * deviation
    assert seeds > 1 or np.mean(covered) <= 0.95 + 3 * deviation


def test_three_seeds_that_alone_matter_give_their_range():
    """As the docstring warns: each extreme is the mean of 1 of 27 resamples, more than the tail's 2.5 %."""
    first = np.repeat(np.array([[0.5], [0.25], [1.0]]), 40, axis=1)
    found = paired_bootstrap(first, np.zeros_like(first))
    assert found == pytest.approx((1.75 / 3, 0.25, 1.0), abs=1e-12)


def test_the_interval_of_many_cases_is_the_normal_one():
    """One seed: the bootstrap's deviation of a mean is the sample's over √n."""
    first, second = simulated(np.random.default_rng(1), seeds=1, cases=2000, effect=0.05)
    found = paired_bootstrap(second, first)
    difference = (second.astype(float) - first)[0]
    half = 1.959964 * difference.std() / np.sqrt(2000)
    assert found.difference == pytest.approx(difference.mean(), abs=1e-15)
    # A quantile at 2.5 % of 10 000 draws has a deviation of 2.7 % of σ; three of them, in units of `half`.
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=3 * 0.027 / 1.96 + 0.01)


def test_the_same_seed_gives_the_same_interval():
    first, second = simulated(np.random.default_rng(2), 3, 50)
    assert paired_bootstrap(first, second, seed=1) == paired_bootstrap(first, second, seed=1)
    assert paired_bootstrap(first, first).low == 0 == paired_bootstrap(first, first).high


def difference_of_means(cases):
    return lambda ours, theirs: (ours[0] - theirs[0])[:, 0] / cases


@pytest.mark.parametrize("seeds", [1, 3])
def test_the_test_of_a_mean_is_that_of_accuracies(seeds):
    """Two estimates of one distribution: its quantiles and its deviation, within five standard errors."""
    generator = np.random.default_rng(seeds)
    first, second = generator.random((2, seeds, 400)) < np.array([0.66, 0.6])[:, None, None]
    values = [[each[..., None].astype(np.float32)] for each in (first, second)]
    (difference, low, high), p_value = figure_test(difference_of_means(400), *values)
    expected = paired_bootstrap(first, second)
    assert difference == pytest.approx(expected.difference, abs=1e-6)  # float32
    # A quantile q of m draws from a normal variable: deviation sigma sqrt(q (1 - q) / m) / density.
    sigma = (expected.high - expected.low) / 2 / 1.96
    error = sigma * np.sqrt(0.025 * 0.975 * (1 / 2000 + 1 / 10_000)) / 0.0584
    assert (low, high) == pytest.approx((expected.low, expected.high), abs=5 * error)
    exact = sign_flip_test(first, second)
    # The deviation of 2000 tosses is known to 1 / sqrt(4000), their mean to sigma / sqrt(2000). The exact
    # test counts totals at least as far away: half a step of the lattice, 1 of the total, is closer.
    of_cases = (first.astype(int) - second).sum(axis=0)
    total, sigma = abs(of_cases.sum()), np.sqrt((of_cases**2).sum())
    nearest = 2 * norm.sf((total / sigma * (1 - 5 / np.sqrt(4000))) - 5 / np.sqrt(2000) - 1 / sigma)
    farthest = 2 * norm.sf((total / sigma * (1 + 5 / np.sqrt(4000))) + 5 / np.sqrt(2000))
    assert farthest < p_value < nearest
    assert farthest < exact < nearest


def test_the_size_of_the_test_of_figures():
    """Two kinds of cases, a figure that is a ratio: p values below 0.05 come in 5 % of experiments."""
    generator = np.random.default_rng(0)

    def ratios(ours, theirs):
        return (ours[0] / ours[1] - theirs[0] / theirs[1])[:, 0]

    values = []
    for _ in range(300):
        ours, theirs = (
            [generator.exponential(1.0, (2, cases, 1)).astype(np.float32) for cases in (60, 90)]
            for _ in range(2)
        )
        values.append(figure_test(ratios, ours, theirs, resamples=200).p_value)
    rejected = sum(value <= 0.05 for value in values)
    assert binomtest(rejected, 300, 0.05).pvalue > 1e-4


def test_models_that_do_not_differ_have_p_value_1():
    same = [(np.random.default_rng(0).random((2, 30, 1)) < 0.5).astype(np.float32)]
    assert figure_test(difference_of_means(30), same, same) == ((0, 0, 0), 1)
    with pytest.raises(InputError, match=r"\(seeds, cases, values\)"):
        figure_test(difference_of_means(30), same, [same[0][:1]])


def test_holm_of_four_values():
    """The smallest value times the number of tests, the next times one less, never decreasing."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02], rel=1e-15)
    assert holm([0.6, 0.5]) == [1.0, 1.0]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_rejects_what_its_procedure_rejects(values):
    """Step by step: the smallest value against α/m, the next against α/(m-1), until one is not rejected."""
    adjusted = holm(values)
    for level in (0.01, 0.05, 0.2):
        rejected, rest = set(), sorted(range(len(values)), key=values.__getitem__)
        for rank, index in enumerate(rest):
            if values[index] * (len(values) - rank) > level:
                break
            rejected.add(index)
        assert {index for index, value in enumerate(adjusted) if value <= level} == rejected


@pytest.mark.parametrize("shapes", [((3,), (4,)), ((0,), (0,)), ((), ())])
def test_shapes_that_do_not_pair(shapes):
    first, second = (np.zeros(shape, dtype=bool) for shape in shapes)
    for test in (sign_flip_test, paired_bootstrap):
        with pytest.raises(InputError, match="must be equal, of the form"):
            test(first, second)


def test_a_row_is_no_matrix():
    with pytest.raises(InputError, match=r"of the form \(seeds, cases\)"):
        paired_bootstrap(np.zeros(3, bool), np.zeros(3, bool))
