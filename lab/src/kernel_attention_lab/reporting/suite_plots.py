"""The critical-difference diagram of a suite."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from kernel_attention_lab.reporting.figures import report_style

_INCHES_A_LETTER = 0.135  # of the labels, whose size is the library's


def critical_difference(
    scores: Mapping[str, Mapping[str, float]], *, larger_is_better: bool, alpha: float
) -> Figure | None:
    """Mean ranks of the rows over the columns; bars join those between which no difference is found.

    Args:
        scores: by row and column, at least three of each; every row has every column.
        larger_is_better: whether the largest score has rank 1.
        alpha: of Friedman's test, and of the Wilcoxon tests with Holm's adjustment that follow it.

    Returns:
        The figure; None where every row has the same score in every column.
    """
    import matplotlib.pyplot as plt
    from aeon.visualisation import plot_critical_difference

    table = np.array([list(row.values()) for row in scores.values()]).T.round(12)
    if (table == table[:, :1]).all():
        return None
    longest = max(map(len, scores))
    with report_style(), warnings.catch_warnings():
        # SciPy and aeon warn of ties and of few data sets; the table beside the picture has exact tests.
        warnings.simplefilter("ignore")
        figure, _ = plot_critical_difference(
            table,
            list(scores),
            lower_better=not larger_is_better,
            alpha=alpha,
            width=7 + longest * _INCHES_A_LETTER,
            textspace=0.6 + longest * _INCHES_A_LETTER,
        )
    figure.set_layout_engine("none")  # its axes are placed by hand
    plt.close(figure)  # aeon draws with pyplot, which would keep it
    assert isinstance(figure, Figure)
    return figure
