"""Paired comparisons of two models: on the same cases, which are right or wrong, and on the same data sets.

Where there are several seeds, row s is the model of seed s, and both models saw the same cases in the same
order. SciPy has neither an exact signed-rank test with ties nor a bootstrap of cases and seeds together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from kernel_attention.errors import InputError

__all__ = [
    "Interval",
    "Resampled",
    "figure_test",
    "holm",
    "paired_bootstrap",
    "sign_flip_test",
    "signed_rank_test",
]

DECIMALS = 12
"""Differences that are equal to this many decimals are ties: the rounding errors of means are smaller."""

_RESAMPLES_AT_A_TIME = 500
_ByKind = list[np.ndarray]  # an array for each kind of cases


class Interval(NamedTuple):
    """A difference of two accuracies with its interval, ``low`` to ``high``."""

    difference: float
    low: float
    high: float


class Resampled(NamedTuple):
    """The result of ``figure_test``: the interval, and a two-sided p value."""

    interval: Interval
    p_value: float


def sign_flip_test(first: np.ndarray, second: np.ndarray) -> float:
    """The exact paired randomization test over cases, two-sided; of one row McNemar's test (1947).

    The rows are seeds, corruptions, or both. A case's rows are not independent of one another: an image that
    is hard for one seed is hard for the next. So the test sums the differences of a case over all rows and
    flips the sign of that sum. It asks whether *these* trained models differ on further cases. What another
    seed would have given, it does not ask (``paired_bootstrap`` does).

    Args:
        first: (..., cases) bool, where the first model is right.
        second: the same of the second model.

    Returns:
        The probability of a total at least as far from zero when the sign of each case's sum is a fair coin.

    Raises:
        InputError: for other shapes.
    """
    _check_pair(first, second)
    return _chance_of_total((first.astype(np.int64) - second).reshape(-1, first.shape[-1]).sum(axis=0))


def signed_rank_test(differences: Sequence[float]) -> float:
    """Wilcoxon's signed-rank test (1945), exact and two-sided.

    The differences are those of two models on several data sets. Differences of zero are left out, and equal
    ones share their mean rank. The p value is exact for every number of data sets, with ties too: with n
    differences it cannot be below 2^(1-n).

    Args:
        differences: one for each data set.

    Returns:
        The probability of a rank sum at least as far from its mean when every sign is a fair coin; 1 where
        all differences are zero.

    Raises:
        InputError: for a difference that is not finite.
    """
    values = np.round(np.asarray(differences, dtype=np.float64), DECIMALS)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise InputError(f"differences {differences!r:.80} must be finite numbers, one for each data set")
    values = values[values != 0]
    smaller = (np.abs(values)[:, None] > np.abs(values)).sum(axis=1)
    equal = (np.abs(values)[:, None] == np.abs(values)).sum(axis=1)
    doubled_ranks = 2 * smaller + equal + 1  # whole numbers, also where ties share a rank
    return _chance_of_total((np.sign(values) * doubled_ranks).astype(np.int64))


def paired_bootstrap(
    first: np.ndarray, second: np.ndarray, *, level: float = 0.95, resamples: int = 10_000, seed: int = 0
) -> Interval:
    """Percentile interval of the difference of two accuracies, by drawing cases and seeds again.

    A resample draws cases with replacement, the same for all rows and both models, and rows (seeds) with
    replacement, the same for both models (Owen 2007, the pigeonhole bootstrap). It is first minus second.

    The interval is longer than it need be where neither cases nor seeds but chance in every single answer
    decides: that part of the variance is counted up to three times. With few seeds it is too short where
    seeds matter most: with three, and no other variation, it is the range of the three differences, which
    covers the truth in 3 of 4 experiments.

    Args:
        first: (seeds, cases), bool or the share of a case's trials that the first model has right.
        second: the same of the second model.
        level: the share of experiments in which the interval should hold the true difference.
        resamples: their number.
        seed: of the draws.

    Raises:
        InputError: for other shapes.
    """
    _check_pair(first, second, axes=2)
    difference = first.astype(np.float64) - second
    # Cases with the same differences are drawn together: of accuracies there are at most 3^seeds of them.
    kinds, numbers = np.unique(difference, axis=1, return_counts=True)
    seeds, cases = difference.shape
    generator = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, _RESAMPLES_AT_A_TIME):
        count = min(_RESAMPLES_AT_A_TIME, resamples - start)
        of_cases = generator.multinomial(cases, numbers / cases, size=count)
        of_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=count)
        means.append(((of_seeds @ kinds) * of_cases).sum(axis=1) / (seeds * cases))
    tail = (1 - level) / 2
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return Interval(float(difference.mean()), float(low), float(high))


def figure_test(
    difference: Callable[[_ByKind, _ByKind], np.ndarray],
    first: Sequence[np.ndarray],
    second: Sequence[np.ndarray],
    *,
    level: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Resampled:
    """Compare two models by a figure that is no mean over the cases, but follows from sums over them.

    The interval is that of ``paired_bootstrap``, with its limits. The p value asks what that of
    ``sign_flip_test`` asks, whether *these* trained models differ on further cases: each case's values, of
    all seeds together, change sides between the models at the toss of a fair coin. The mean and the
    deviation of the difference over many such tosses make the p value, two-sided, as of a normal variable.
    It is an approximation, for a hundred cases and more.

    Args:
        difference: of the figures of the first and the second model; from sums (resamples, values) of each,
            for each kind of cases, to (resamples,).
        first: for each kind of cases, whose numbers may differ, the first model's (seeds, cases, values).
        second: the same of the second model.
        level: the share of experiments in which the interval should hold the true difference.
        resamples: number of draws and of tosses.
        seed: of the draws.

    Returns:
        The difference is the mean over the seeds. The p value is 1 where nothing changes with a toss.

    Raises:
        InputError: for other shapes.
    """
    for pair in zip(first, second, strict=True):
        _check_pair(*pair, axes=3)
    generator = np.random.default_rng(seed)
    seeds = len(first[0])
    drawn, tossed = [], []
    for start in range(0, resamples, _RESAMPLES_AT_A_TIME):
        count = min(_RESAMPLES_AT_A_TIME, resamples - start)
        counts = [_drawn(generator, values.shape[1], count) for values in first]
        sums = (
            [each @ values for each, values in zip(counts, side, strict=True)] for side in (first, second)
        )
        drawn.append(_by_seed(difference, *sums))
        # A case with heads (1) stays with its model; the others change sides.
        tosses = [generator.integers(0, 2, (count, values.shape[1])).astype(np.float32) for values in first]
        gains = [heads @ (own - other) for heads, own, other in zip(tosses, first, second, strict=True)]
        ours = [other.sum(axis=1, keepdims=True) + gain for other, gain in zip(second, gains, strict=True)]
        theirs = [own.sum(axis=1, keepdims=True) - gain for own, gain in zip(first, gains, strict=True)]
        tossed.append(_by_seed(difference, ours, theirs).mean(axis=1))
    of_seeds = generator.multinomial(seeds, np.full(seeds, 1 / seeds), size=resamples)
    tail = (1 - level) / 2
    low, high = np.quantile((np.concatenate(drawn) * of_seeds).sum(axis=1) / seeds, [tail, 1 - tail])
    ours, theirs = ([values.sum(axis=1, keepdims=True) for values in side] for side in (first, second))
    found = float(_by_seed(difference, ours, theirs).mean())
    chance = np.concatenate(tossed)
    deviation = float(chance.std(ddof=1))
    distance = abs(found - float(chance.mean()))
    p_value = math.erfc(distance / deviation / math.sqrt(2)) if deviation > 0 else 1.0
    return Resampled(Interval(found, float(low), float(high)), p_value)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjustment (1979) of the p values of several tests, in the order given.

    Rejecting where the adjusted value is at most α has a chance of at most α of any false rejection, however
    the tests depend on one another.
    """
    count = len(p_values)
    adjusted, largest = [0.0] * count, 0.0
    for rank, index in enumerate(sorted(range(count), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, (count - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def _drawn(generator: np.random.Generator, cases: int, resamples: int) -> np.ndarray:
    """How often each case is drawn in each resample, (resamples, cases)."""
    places = generator.integers(cases, size=(resamples, cases)) + cases * np.arange(resamples)[:, None]
    counts = np.bincount(places.ravel(), minlength=resamples * cases)
    return counts.reshape(resamples, cases).astype(np.float32)


def _by_seed(
    difference: Callable[[_ByKind, _ByKind], np.ndarray], ours: _ByKind, theirs: _ByKind
) -> np.ndarray:
    """The difference of two models' sums (seeds, resamples, values), as (resamples, seeds)."""
    return np.stack(
        [
            difference([sums[seed] for sums in ours], [sums[seed] for sums in theirs])
            for seed in range(len(ours[0]))
        ],
        axis=1,
    )


def _chance_of_total(steps: np.ndarray) -> float:
    """The chance of a total at least as far from zero as that of the steps when each sign is a fair coin."""
    reach = int(np.abs(steps).sum())
    chances = np.zeros(2 * reach + 1)  # of the totals -reach to reach
    chances[reach] = 1.0
    for step in np.abs(steps[steps != 0]).tolist():
        halves, chances = chances / 2, np.zeros_like(chances)
        chances[step:] += halves[:-step]
        chances[:-step] += halves[step:]
    far = np.abs(np.arange(-reach, reach + 1)) >= abs(int(steps.sum()))
    return min(1.0, float(chances[far].sum()))


def _check_pair(first: np.ndarray, second: np.ndarray, axes: int | None = None) -> None:
    is_right = first.shape == second.shape and first.size and first.ndim == (axes or max(first.ndim, 1))
    if not is_right:
        expected = {2: "(seeds, cases)", 3: "(seeds, cases, values)", None: "(..., cases)"}[axes]
        raise InputError(f"shapes {first.shape} and {second.shape} must be equal, of the form {expected}")
