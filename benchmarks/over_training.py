"""The papers' figures by layer before and after training, of several runs side by side.

    kernel-attention analyze RUN --over_training        # for each run
    python benchmarks/over_training.py RUN RUN RUN --figure docs/figures/over-training.png

Prints a Markdown table: the first and the last kept copy of the weights, mean of the layers and each layer,
means over the seeds. The figure has the mean of the layers over training, one line per run.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.experiments.reporting.course_plots import COURSES
from kernel_attention.experiments.reporting.formats import attention_title, format_number
from kernel_attention.experiments.run_folder import RunFolder

Course = dict[str, np.ndarray]  # figure -> (copies, layers)


def read(folder: RunFolder) -> tuple[np.ndarray, Course]:
    """The epochs of the kept copies, and every figure, the mean over the seeds."""
    found = [course for seed in folder.seeds() if (course := folder.diagnostics_over_training(seed))]
    if not found:
        raise SystemExit(f"{folder.path}: has no course; run kernel-attention analyze RUN --over_training")
    epochs = [entry["epoch"] for entry in found[0]["epochs"]]
    curves = {
        key: np.mean([[_figures(entry, key) for entry in course["epochs"]] for course in found], axis=0)
        for key in COURSES
    }
    return np.array(epochs), {key: values for key, values in curves.items() if np.isfinite(values).any()}


def _figures(entry: dict[str, Any], key: str) -> list[float]:
    return [layer["summary"].get(key, np.nan) for layer in entry["layers"]]


def table(courses: dict[str, tuple[np.ndarray, Course]]) -> str:
    """Rows are figures of a run, columns the mean of the layers and every layer."""
    layers = max(values.shape[1] for _, course in courses.values() for values in course.values())
    lines = [
        "| figure | run | mean of the layers | " + " | ".join(map(str, range(layers))) + " |",
        "|" + "---|" * (layers + 3),
    ]
    for key, title in COURSES.items():
        for name, (_, course) in courses.items():
            if key in course:
                first, last = course[key][0], course[key][-1]
                ends = [(np.nanmean(first), np.nanmean(last)), *zip(first, last, strict=True)]
                cells = [f"{format_number(float(a), 3)} → {format_number(float(b), 3)}" for a, b in ends]
                lines.append(f"| {title} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def draw(courses: dict[str, tuple[np.ndarray, Course]], path: Path) -> None:
    """The mean of the layers over training: a panel for each figure, a line for each run."""
    from kernel_attention.experiments.reporting.diagnostic_plots import free_panels, save_figure
    from kernel_attention.experiments.reporting.figures import PALETTE, legend_below, report_style

    shown = [key for key in COURSES if any(key in course for _, course in courses.values())]
    with report_style():
        figure, axes = free_panels(len(shown))
        for axis, key in zip(axes, shown, strict=True):
            for color, (name, (epochs, course)) in zip(PALETTE, courses.items(), strict=False):
                if key in course:
                    axis.plot(epochs, np.nanmean(course[key], axis=1), color=color, label=name)
            axis.set(title=COURSES[key], xlabel="epoch")
        legend_below(figure, axes[0])
        save_figure(figure, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--figure", type=Path, help="draw the means of the layers to this file")
    options = parser.parse_args()
    folders = [RunFolder(path) for path in options.runs]
    names = [attention_title((folder.config() or {}).get("attention")) for folder in folders]
    if len(set(names)) < len(names):
        names = [folder.path.name for folder in folders]
    courses = {name: read(folder) for name, folder in zip(names, folders, strict=True)}
    print(table(courses))
    if options.figure:
        draw(courses, options.figure)


if __name__ == "__main__":
    main()
