"""Rows compared over data sets: by hand, and with SciPy's test."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import wilcoxon

from kernel_attention_lab.evidence.comparison import Measurement, columns_needed, compare_over_columns

SOFTMAX = (0.90, 0.80, 0.70, 0.60, 0.50, 0.40)
BETTER = (0.91, 0.82, 0.73, 0.64, 0.55, 0.46)
MIXED = (0.95, 0.70, 0.72, 0.55, 0.50, 0.41)


def table(**rows):
    """Of one seed; a column is named by its number."""
    return {
        row: {str(at): {0: Measurement(value)} for at, value in enumerate(values)}
        for row, values in rows.items()
    }


def test_two_rows_by_hand():
    measured = table(softmax=SOFTMAX, better=BETTER, mixed=MIXED)
    better, mixed = compare_over_columns(measured, {"better": "softmax", "mixed": "softmax"})
    assert (better.row, better.baseline, better.larger, better.smaller) == ("better", "softmax", 6, 0)
    assert better.mean == pytest.approx(0.035)
    assert better.p_value == 2 / 2**6
    assert better.adjusted == 2 * better.p_value, "Holm: the smaller of two p values counts twice"
    assert (mixed.larger, mixed.smaller) == (3, 2), "one column is equal"
    # Ranks 1, 2, 3.5, 3.5, 5, of which 1, 2 and one 3.5 are positive: 6.5 of 15. Nearer to 7.5 are 2 + 5,
    # 3.5 + 3.5 and what they leave.
    assert mixed.p_value == 28 / 32
    assert mixed.adjusted == mixed.p_value
    first, second = compare_over_columns(measured, {"better": ["softmax", "mixed"]})
    assert (first, second.baseline) == (better._replace(least=first.least), "mixed")


def test_without_ties_the_test_is_scipys():
    values = (0.95, 0.70, 0.72, 0.57, 0.49, 0.48)
    (found,) = compare_over_columns(table(softmax=SOFTMAX, row=values), {"row": "softmax"})
    expected = wilcoxon(np.subtract(values, SOFTMAX), method="exact").pvalue
    assert found.p_value == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("comparisons", [1, 2, 3, 7])
def test_columns_that_can_tell_and_columns_that_cannot(comparisons):
    """Differences of one sign everywhere: found with the number needed, and not with one less."""
    needed = columns_needed(comparisons)
    for columns in (needed - 1, needed):
        values = [0.5 + 0.01 * (1 + place) for place in range(columns)]
        rows = {f"row{at}": values for at in range(comparisons)}
        measured = table(softmax=[0.5] * columns, **rows)
        found = compare_over_columns(measured, dict.fromkeys(rows, "softmax"))
        assert [each.adjusted for each in found] == [each.least for each in found]
        assert all((each.least <= 0.05) == (columns == needed) for each in found)
    assert columns_needed(1) == 6, "the exact test cannot reach 0.05 with five"


def test_the_seeds_that_both_have_count():
    measured = table(softmax=SOFTMAX[:3], row=SOFTMAX[:3])
    measured["softmax"]["0"] = {0: Measurement(0.5), 1: Measurement(0.9), 2: Measurement(0.1)}
    measured["row"]["0"] = {1: Measurement(0.7), 2: Measurement(0.2), 3: Measurement(1.0)}
    (found,) = compare_over_columns(measured, {"row": "softmax"})
    assert found.differences == pytest.approx({"0": -0.05, "1": 0.0, "2": 0.0})


def test_rounding_breaks_no_tie():
    """The same 13 of 45 right answers, spread otherwise over three seeds of 15 cases."""
    rights = {"softmax": (5, 4, 4), "row": (6, 4, 3)}
    values = {row: [right / 15 for right in of_row] for row, of_row in rights.items()}
    assert sum(map(float.__sub__, values["row"], values["softmax"])) != 0, "or there is nothing to round"
    measured = table(softmax=SOFTMAX[:3], row=SOFTMAX[:3])
    for row, of_row in values.items():
        measured[row]["0"] = {seed: Measurement(value) for seed, value in enumerate(of_row)}
    (found,) = compare_over_columns(measured, {"row": "softmax"})
    assert (found.larger, found.smaller) == (0, 0)
