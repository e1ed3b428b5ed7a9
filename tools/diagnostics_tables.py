"""The table and the figure of docs/diagnostics.md, from records of the diagnostics over training.

``benchmarks/over_training.py`` writes the records.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from generated import NOTHING, svg_text, table
from matplotlib.figure import Figure

from kernel_attention.experiments.reporting.course_plots import COURSES
from kernel_attention.experiments.reporting.diagnostic_plots import free_panels
from kernel_attention.experiments.reporting.figures import PALETTE, legend_below, report_style
from kernel_attention.experiments.reporting.formats import format_number

PAGE = Path("docs/diagnostics.md")
RECORDS = Path("results/vision/cifar10_deep_course")
FIGURE = Path("docs/figures/over-training.svg")
_DIGITS = 3

Courses = Mapping[str, Mapping[str, Any]]
"""By label, the epochs of the kept weights and the figures of every layer at each of them."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's region by its mark, and the file of the figure."""
    paths = sorted((root / RECORDS).glob("*-0.json"))
    courses = {path.stem.removesuffix("-0"): json.loads(path.read_text(encoding="utf-8")) for path in paths}
    if not courses:
        return {"over-training": NOTHING}, {}
    return {"over-training": course_lines(courses)}, {FIGURE: svg_text(course_figure(courses))}


def course_lines(courses: Courses) -> list[str]:
    """A row for every figure and model: the mean of the layers, the first, the middle one and the last."""
    rows = []
    for key, title in COURSES.items():
        for label, course in courses.items():
            if key not in course["figures"]:
                continue
            values = figures_of(course, key)
            places = [0, values.shape[1] // 2, values.shape[1] - 1]
            columns = [np.nanmean(values, axis=1), *(values[:, place] for place in places)]
            rows.append([title, label, *(_arrow(column[[0, 1, -1]]) for column in columns)])
    layers = next(iter(next(iter(courses.values()))["figures"].values()))[0]
    head = ["figure", "attention", "mean of the layers", "layer 0"]
    head += [f"layer {len(layers) // 2}", f"layer {len(layers) - 1}"]
    epochs = next(iter(courses.values()))["epochs"]
    said = f"Before training → after epoch {epochs[1]} → after epoch {epochs[-1]}; one seed."
    return [
        "",
        *table(head, rows),
        "",
        said,
        "",
        "![Mean of the layers over training](figures/over-training.svg)",
        "",
    ]


def course_figure(courses: Courses) -> Figure:
    """The mean of the layers over training: a panel for each figure, a line for each model."""
    shown = [key for key in COURSES if any(key in course["figures"] for course in courses.values())]
    with report_style():
        figure, axes = free_panels(len(shown))
        for axis, key in zip(axes, shown, strict=True):
            for color, (label, course) in zip(PALETTE, courses.items(), strict=False):
                if key in course["figures"]:
                    mean = np.nanmean(figures_of(course, key), axis=1)
                    axis.plot(course["epochs"], mean, color=color, label=label)
            axis.set(title=COURSES[key], xlabel="epoch")
        legend_below(figure, axes[0])
    return figure


def figures_of(course: Mapping[str, Any], key: str) -> np.ndarray:
    """A figure of every copy and layer, (copies, layers)."""
    return np.array(course["figures"][key], dtype=np.float64)


def _arrow(values: np.ndarray) -> str:
    return " → ".join("–" if np.isnan(value) else format_number(float(value), _DIGITS) for value in values)
