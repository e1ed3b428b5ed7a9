"""The table and the figure of docs/diagnostics.md, from records of the diagnostics over training.

``benchmarks/over_training.py`` writes the records.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from generated import NOTHING, svg_text, table
from matplotlib.figure import Figure

from kernel_attention_lab.reporting.course_plots import COURSES
from kernel_attention_lab.reporting.diagnostic_plots import free_panels
from kernel_attention_lab.reporting.figures import PALETTE, legend_below, report_style
from kernel_attention_lab.reporting.formats import format_number

PAGE = Path("docs/diagnostics.md")
RECORDS = Path("results/vision/cifar10_deep_course")
FIGURE = Path("docs/figures/over-training.svg")
_DIGITS = 3

Course = tuple[list[int], dict[str, np.ndarray], int]
"""Epochs of the kept weights, figures (epochs, layers), the mean over the seeds, and how many seeds."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the page's region by its mark, and the file of the figure."""
    courses = read_courses(root / RECORDS)
    if not courses:
        return {"over-training": NOTHING}, {}
    return {"over-training": course_lines(courses)}, {FIGURE: svg_text(course_figure(courses))}


def read_courses(folder: Path) -> dict[str, Course]:
    """The courses by label, from files ``LABEL-SEED.json``."""
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for path in sorted(folder.glob("*.json")):
        found[path.stem.rpartition("-")[0]].append(json.loads(path.read_text(encoding="utf-8")))
    courses = {}
    for label, seeds in found.items():
        first = seeds[0]
        means = {
            key: np.mean([np.array(seed["figures"][key], dtype=np.float64) for seed in seeds], axis=0)
            for key in first["figures"]
        }
        courses[label] = first["epochs"], means, len(seeds)
    return courses


def course_lines(courses: Mapping[str, Course]) -> list[str]:
    """A row for every figure and model: the mean of the layers, the first, the middle one and the last."""
    epochs, figures, _ = next(iter(courses.values()))
    layers = next(iter(figures.values())).shape[1]
    places = [0, layers // 2, layers - 1]
    rows = []
    for key, title in COURSES.items():
        for label, (_, figures, _) in courses.items():
            if key in figures:
                columns = [np.nanmean(figures[key], axis=1), *figures[key].T[places]]
                rows.append([title, label, *(_arrow(column[[0, 1, -1]]) for column in columns)])
    head = ["figure", "attention", "mean of the layers", *(f"layer {place}" for place in places)]
    seeds = [
        f"{label}: {'one seed' if count == 1 else f'{count} seeds'}" for label, (*_, count) in courses.items()
    ]
    said = f"Before training → after epoch {epochs[1]} → after epoch {epochs[-1]}. {'; '.join(seeds)}."
    picture = f"![Mean of the layers over training]({FIGURE.relative_to(PAGE.parent).as_posix()})"
    return ["", *table(head, rows), "", said, "", picture, ""]


def course_figure(courses: Mapping[str, Course]) -> Figure:
    """The mean of the layers over training: a panel for each figure, a line for each model."""
    shown = [key for key in COURSES if any(key in figures for _, figures, _ in courses.values())]
    with report_style():
        figure, axes = free_panels(len(shown))
        for axis, key in zip(axes, shown, strict=True):
            for color, (label, (epochs, figures, _)) in zip(PALETTE, courses.items(), strict=False):
                if key in figures:
                    axis.plot(epochs, np.nanmean(figures[key], axis=1), color=color, label=label)
            axis.set(title=COURSES[key], xlabel="epoch")
        legend_below(figure, axes[0])
    return figure


def _arrow(values: np.ndarray) -> str:
    return " → ".join("–" if np.isnan(value) else format_number(float(value), _DIGITS) for value in values)
