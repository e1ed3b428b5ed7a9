"""Several runs side by side: one table of their figures, and one page with the seeds and the curves."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from kernel_attention.errors import InputError, writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.curves import QUANTITIES, curve_figure, mean_curve
from kernel_attention_lab.reporting.figures import INK, data_uri, report_style, seed_styles
from kernel_attention_lab.reporting.formats import (
    MISSING,
    attention_details,
    attention_title,
    format_metric,
    format_number,
    format_seeds,
    format_spread,
    format_value,
    is_share,
    metric_name,
)
from kernel_attention_lab.reporting.records import RunRecord, read_run
from kernel_attention_lab.reporting.tables import text_table
from kernel_attention_lab.run_folder import is_number

if TYPE_CHECKING:
    from rich.table import Table

_OWN = ("seeds", "plugins", "attention")  # keys that the table shows in columns of their own, or not at all


@dataclass(frozen=True)
class ComparedRun:
    """A run, the name that tells it from the others, and the headline figure of each seed."""

    name: str
    run: RunRecord
    values: dict[int, float]

    @property
    def mean(self) -> float | None:
        """Over the seeds; None without any."""
        return statistics.fmean(self.values.values()) if self.values else None

    @property
    def deviation(self) -> float | None:
        """Sample deviation over the seeds; None for fewer than two."""
        return statistics.stdev(self.values.values()) if len(self.values) > 1 else None


@dataclass(frozen=True)
class RunComparison:
    """Runs of one metric. The first is the one that the others are compared with."""

    metric: str
    runs: tuple[ComparedRun, ...]

    @property
    def seeds(self) -> list[int]:
        """Every seed that any run has evaluated."""
        return sorted({seed for run in self.runs for seed in run.values})

    @property
    def differing(self) -> list[str]:
        """The keys of the recipes that are not the same in all runs, in the order of the first recipe."""
        keys = dict.fromkeys(key for each in self.runs for key in each.run.config if key not in _OWN)
        first = self.runs[0].run.config
        return [
            key for key in keys if any(each.run.config.get(key) != first.get(key) for each in self.runs[1:])
        ]

    def attention(self, run: ComparedRun) -> str:
        """The names of a run's mechanisms; with their options where another run has the same names."""
        spec, *others = (_spec(each.run) for each in (run, *self.runs))
        title = attention_title(spec)
        is_told_apart = all(other == spec or attention_title(other) != title for other in others)
        return title if is_told_apart else attention_details(spec)

    def difference(self, run: ComparedRun) -> tuple[float, int] | None:
        """The mean difference to the first run over the seeds that both have, and how many these are."""
        first = self.runs[0].values
        shared = [run.values[seed] - first[seed] for seed in run.values if seed in first]
        return (statistics.fmean(shared), len(shared)) if shared and run is not self.runs[0] else None

    @property
    def remarks(self) -> list[str]:
        """Differences that make the figures less comparable than they look."""
        found = []
        for key, what in (("dataset", "data sets"), ("protocol", "protocols")):
            values = {str(each.run.fact(key)) for each in self.runs}
            if len(values) > 1:
                found.append(f"the runs have different {what}: {', '.join(sorted(values))}")
        for each in self.runs:
            left = [seed for seed in each.run.planned_seeds if seed not in each.values]
            if left:
                found.append(f"{each.name}: not evaluated yet: {format_seeds(left)}")
        return found


def compare_runs(folders: Sequence[str | Path]) -> RunComparison:
    """Read the run folders.

    Raises:
        InputError: for fewer than two folders, one that is given twice or is no run, and runs whose headline
            figures are not the same.
    """
    if len(folders) < 2:
        raise InputError("compare needs at least two runs (see: kernel-attention compare --help)")
    paths = [Path(folder) for folder in folders]
    resolved = [Path(os.path.realpath(path)) for path in paths]  # Path.resolve fails for a link to itself
    for number, path in enumerate(resolved):
        if path in resolved[:number]:
            raise InputError(f"run {folders[number]}: is given twice")
    runs = [read_run(path) for path in paths]
    metrics = {run.metric: str(path) for run, path in zip(runs, paths, strict=True)}
    if len(metrics) > 1:
        listed = ", ".join(f"{metric} ({path})" for metric, path in metrics.items())
        raise InputError(f"the runs have different figures, and cannot stand in one table: {listed}")
    metric = runs[0].metric
    compared = [
        ComparedRun(name, run, _values(run, metric)) for name, run in zip(_names(resolved), runs, strict=True)
    ]
    return RunComparison(metric, tuple(compared))


def _spec(run: RunRecord) -> Any:
    """The attention with its options, of which the summary has the name alone."""
    return run.config.get("attention", run.fact("attention"))


def _values(run: RunRecord, metric: str) -> dict[int, float]:
    found = {record.seed: (record.evaluation or {}).get(metric) for record in run.seeds}
    return {seed: float(value) for seed, value in found.items() if is_number(value)}


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ."""
    longest = max(len(path.parts) for path in paths)
    for count in range(1, longest + 1):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return [name.encode(errors="backslashreplace").decode() for name in names]  # plots take text alone


def comparison_rows(comparison: RunComparison) -> list[dict[str, Any]]:
    """One record a run, for a file: the name, the differing keys, each seed's figure, mean and deviation."""
    rows = []
    for each in comparison.runs:
        difference, shared = comparison.difference(each) or (None, None)
        rows.append(
            {
                "run": each.name,
                "attention": comparison.attention(each),
                **{key: each.run.config.get(key) for key in comparison.differing},
                **{f"seed_{seed}": each.values.get(seed) for seed in comparison.seeds},
                "metric": comparison.metric,
                "mean": each.mean,
                "std": each.deviation,
                "difference": difference,
                "shared_seeds": shared,
            }
        )
    return rows


def comparison_table(comparison: RunComparison) -> Table:
    """The runs on the screen, one row each."""
    return text_table(f"test {metric_name(comparison.metric)}", *_cells(comparison), fold=True)


def _cells(comparison: RunComparison) -> tuple[list[str], list[list[str]]]:
    metric, seeds = comparison.metric, [f"seed_{seed}" for seed in comparison.seeds]
    head = ["run", "attention", *comparison.differing, *(seed.replace("_", " ") for seed in seeds)]
    rows = [
        [
            row["run"],
            row["attention"],
            *(format_value(row[key]) for key in comparison.differing),
            *(format_metric(metric, row[seed]) for seed in seeds),
            format_spread(metric, row["mean"], row["std"]),
            _difference_text(metric, row["difference"], row["shared_seeds"]),
        ]
        for row in comparison_rows(comparison)
    ]
    return [*head, "mean", f"minus {comparison.runs[0].name}"], rows


def _difference_text(metric: str, difference: float | None, count: int | None) -> str:
    if difference is None or count is None:
        return MISSING
    seeds = f"{count} seed{'s' if count > 1 else ''}"
    if is_share(metric):
        return f"{100 * difference:+.2f} points ({seeds})".replace("-", "−", 1)
    return f"{'+' if difference > 0 else ''}{format_number(difference, digits=3)} ({seeds})"


def write_comparison(comparison: RunComparison, path: Path) -> Path:
    """Write the page, one file without scripts, and return its path.

    Raises:
        InputError: where the file cannot be written.
    """
    with writing(f"output {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, render_comparison(comparison))
    return path


def render_comparison(comparison: RunComparison) -> str:
    """The page as text."""
    head, rows = _cells(comparison)
    caption = "Means with the sample deviation over the seeds; differences over the seeds of both runs."
    sections = [html.Section("figures", "Figures", [html.Table(head, rows, caption, numbers=True)])]
    if pictures := _pictures(comparison):
        sections.append(html.Section("curves", "Curves", [html.Pictures(pictures, pair=len(pictures) > 1)]))
    opening = [html.Notice("Read with care", tuple(comparison.remarks))] if comparison.remarks else []
    return html.page(
        title=f"{len(comparison.runs)} runs compared",
        lead=f"test {metric_name(comparison.metric)} · {', '.join(each.name for each in comparison.runs)}",
        opening=opening,
        sections=sections,
        footer="Written by kernel-attention from the run folders. This page needs no network.",
    )


def _pictures(comparison: RunComparison) -> list[html.Picture]:
    """The seeds, and one picture for each quantity that at least two runs followed on evaluated cases."""
    metric = metric_name(comparison.metric)
    pictures = []
    if comparison.seeds:
        means = "; ".join(
            f"{each.name} {format_metric(comparison.metric, each.mean)}" for each in comparison.runs
        )
        pictures.append(
            html.Picture(
                data_uri(_seeds(comparison)), f"Dot chart of the test {metric}. Means: {means}.",
                f"Test {metric}: a dot for every seed, a bar for the mean",
            )
        )  # fmt: skip
    for name in QUANTITIES:
        found = {each.name: each.run.curves(f"val_{name}") for each in comparison.runs}
        curves = {run: mean_curve(list(by_seed.values())) for run, by_seed in found.items() if by_seed}
        units = {each.run.unit for each in comparison.runs if each.name in curves}
        if len(curves) < 2 or len(units) > 1:
            continue
        unit = units.pop()
        ends = "; ".join(f"{run} {format_metric(name, curve[1][-1])}" for run, curve in curves.items())
        panels = {run[-40:]: {0: curve} for run, curve in curves.items()}
        figure = curve_figure(panels, metric_name(name), unit=unit, percent=is_share(name))
        pictures.append(
            html.Picture(
                data_uri(figure),
                f"Line chart of the {metric_name(name)} on the cases that select the weights. Ends: {ends}.",
                f"{metric_name(name).capitalize()} on the cases that select the weights, by {unit}: the mean "
                "over the seeds",
            )
        )
    return pictures


@report_style()
def _seeds(comparison: RunComparison) -> Figure:
    figure = Figure(figsize=(5.2, 1.2 + 0.4 * len(comparison.runs)))
    axis = figure.subplots()
    styles = seed_styles(comparison.seeds)
    for place, each in enumerate(comparison.runs):
        for seed, value in each.values.items():
            axis.plot(value, place, marker="o", linestyle="", color=styles[seed]["color"])
        if each.mean is not None:
            axis.plot(each.mean, place, marker="|", markersize=18, linestyle="", color=INK)
    axis.set_yticks(range(len(comparison.runs)), [each.name[-40:] for each in comparison.runs])
    axis.invert_yaxis()
    axis.set_xlabel(metric_name(comparison.metric))
    if is_share(comparison.metric):
        axis.xaxis.set_major_formatter(PercentFormatter(1.0))
    return figure
