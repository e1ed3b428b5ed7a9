"""A declared figure: lines over observations, or a critical-difference diagram, as SVG."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from kernel_attention.errors import unknown
from kernel_attention_lab.evidence.expressions import Observation, Observations, evaluate, fill, grouped
from kernel_attention_lab.evidence.findings import SIGNIFICANT
from kernel_attention_lab.reporting.figures import (
    DASHES,
    free_panels,
    legend_below,
    panel_grid,
    report_style,
    seed_styles,
    whole_numbers,
)

_MARKERS = dict(zip(DASHES, "os^D", strict=True))  # a point has no dashes to tell it by
_INCHES_A_LETTER = 0.135  # of the labels, whose size is the library's


def draw_figure(spec: Mapping[str, Any], observations: Observations) -> str | None:
    """A figure as SVG that is the same every time; None where there is nothing to draw.

    Keys of ``spec``:
        kind: ``lines`` (the default) or ``ranks``.
        where: which observations.
        line: the expression whose values have a line each; ``label`` is its text in the legend.
        x, y: expressions for each observation. Values of x that are no numbers stand side by side.
        points: instead of them, an expression for the (x, y) of one observation, which has a line of its own.
        band: the opacity of the range over the seeds, 0 for none.
        panel: the expression whose values have a panel each; ``free`` panels have axes of their own.
        axes: ``xlabel``, ``ylabel``, ``ylim``, ``title`` and so on of matplotlib.
        height, width, log, ticks, whole, fewest: of a panel; its logarithmic axes (``x``, ``y``, ``xy``); x's
            values are ticks; whole numbers; the least number of points of a line.
    """
    kinds = {"lines": _lines, "ranks": _ranks}
    if where := spec.get("where"):
        observations = [each for each in observations if evaluate(where, each)]
    if not observations:
        return None
    kind = spec.get("kind", "lines")
    if kind not in kinds:
        raise unknown("kind of figure", kind, kinds)
    figure = kinds[kind](spec, observations)
    return None if figure is None else svg_text(figure)


def svg_text(figure: Figure) -> str:
    """A figure as SVG that is the same every time."""
    buffer = io.StringIO()
    with report_style():
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _ranks(spec: Mapping[str, Any], observations: Observations) -> Figure | None:
    """Mean ranks of ``scores``, or of the rows that have every column of ``complete``."""
    if "scores" in spec:
        larger = not observations[0].get("smaller_is_better")
        found = evaluate(spec["scores"], observations[0])
        return critical_difference(found, larger_is_better=larger, alpha=SIGNIFICANT) if found else None
    columns = spec["complete"]
    scores: dict[str, dict[str, float]] = {}
    for (row,), members in grouped(observations, spec["line"]).items():
        by_column = grouped(members, spec["x"])
        if {key for (key,) in by_column} >= set(columns):
            scores[row] = {
                column: float(np.mean([evaluate(spec["y"], each) for each in by_column[column,]]))
                for column in columns
            }
    if len(scores) < spec.get("fewest", 3):
        return None
    return critical_difference(scores, larger_is_better=True, alpha=SIGNIFICANT)


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


def _lines(spec: Mapping[str, Any], observations: Observations) -> Figure | None:
    panels = grouped(observations, spec["panel"]) if "panel" in spec else {("",): observations}
    curves = {panel: _curves(spec, members) for panel, members in panels.items()}
    curves = {panel: found for panel, found in curves.items() if found}
    if not curves:
        return None
    lines = {line: members[0] for (line,), members in grouped(observations, spec["line"]).items()}
    places = [each.get("order", at) for at, each in enumerate(lines.values())]
    styles = dict(zip(lines, map(seed_styles(range(max(places) + 1)).get, places), strict=True))
    with report_style():
        if spec.get("free"):
            figure, axes = free_panels(len(curves))
        else:
            figure, axes = panel_grid(len(curves), spec.get("height", 3.6), spec.get("width", 6.8))
        for axis, ((panel,), found) in zip(axes, curves.items(), strict=True):
            for line, drawn in found.items():
                label = fill(spec.get("label", line), lines[line])
                for number, (at, each) in enumerate(drawn):
                    means = [float(np.nanmean(values)) for values in each]
                    style = dict(styles[line])
                    if spec.get("marked"):
                        style |= {"marker": _MARKERS[style["linestyle"]], "markersize": 3.5}
                    axis.plot(at, means, label=None if number else label, **style)
                    if spec.get("band"):
                        low, high = (list(map(end, each)) for end in (min, max))
                        axis.fill_between(at, low, high, color=styles[line]["color"], alpha=spec["band"])
            _scale(axis, spec, found, panels[panel,] if spec.get("free") else observations)
            axis.set(**({"title": panel} if panel else {}), **spec.get("axes", {}))
        if len(curves) == 1 or max(map(len, curves.values())) > 1:  # else the panels' titles say enough
            legend_below(figure, max(axes, key=lambda axis: len(axis.get_lines())))
    return figure


def _curves(spec: Mapping[str, Any], observations: Observations) -> dict[str, list[Any]]:
    """By line, the x of its points and the values at each of them; a line for each seed of ``points``."""
    names = [name for (name,) in grouped(observations, spec["x"])] if "x" in spec else []
    found: dict[str, list[Any]] = {}
    for (line,), members in grouped(observations, spec["line"]).items():
        if "points" in spec:
            courses = [zip(*evaluate(spec["points"], each), strict=True) for each in members]
            found[line] = [(list(at), [[y] for y in ys]) for at, ys in courses]
            continue
        by_place: dict[float, list[float]] = {}
        for (name,), alike in grouped(members, spec["x"]).items():
            place = evaluate(spec["x"], alike[0])
            if not isinstance(place, int | float):
                place = names.index(name)
            values = [value for each in alike if (value := evaluate(spec["y"], each)) is not None]
            if values:
                by_place[place] = values
        if len(by_place) >= spec.get("fewest", 1):
            ordered = sorted(by_place)
            found[line] = [(ordered, [by_place[place] for place in ordered])]
    return found


def _scale(axis: Any, spec: Mapping[str, Any], found: Mapping[str, Any], observations: Observations) -> None:
    if "x" in (log := spec.get("log", "")):
        axis.set_xscale("log", base=2)
    if "y" in log:
        axis.set_yscale("log")
    if spec.get("whole"):
        axis.xaxis.set_major_locator(whole_numbers())
    if ticks := spec.get("ticks"):
        firsts: list[Observation] = [members[0] for members in grouped(observations, spec["x"]).values()]
        at = [evaluate(spec["x"], each) for each in firsts]
        places = at if all(isinstance(place, int | float) for place in at) else list(range(len(at)))
        axis.set_xticks(places, [fill(ticks, each) for each in firsts])
