"""The tables of docs/results.md, from the records of the suites that the page shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from generated import table
from reproduction_tables import markdown

from kernel_attention.experiments.reporting.formats import is_share, metric_name
from kernel_attention.experiments.reproduction import Findings, Places, Suite, find, read_suite
from kernel_attention.experiments.reproduction.findings import measurements
from kernel_attention.experiments.reproduction.page import facts, record_table
from kernel_attention.experiments.results import Measurement, spread

PAGE = Path("docs/results.md")

SECTIONS = {
    "every-mechanism": ("every_mechanism",),
    "uea": ("primal_attention_uea", "primal_dual_uea", "primal_dual_uea_more"),
    "sentences": ("kernel_pca_sst2", "kernel_pca_sst2_finetune"),
    "language": ("kernel_pca_ptb",),
}
"""The suites of every region of the page, by its mark."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks; there are no figures."""
    places = Places(root / "runs", root / "results")
    regions = {
        mark: ["", *(line for name in names for line in suite_lines(read_suite(name), places))]
        for mark, names in SECTIONS.items()
    }
    return {"demo": demo_lines(read_suite("every_mechanism"), places), **regions}, {}


def demo_lines(suite: Suite, places: Places) -> list[str]:
    """The accuracy of the demo, which is the suite's row ``primal`` on JapaneseVowels."""
    found = measurements(suite, places)["primal"].get("JapaneseVowels")
    said = f"Test accuracy, %: {figure(found, suite.metric)}." if found else "No record of it yet."
    return ["", said, ""]


def suite_lines(suite: Suite, places: Places) -> list[str]:
    """What a suite measured under either protocol, and where its records are from; or that there are none."""
    lines = []
    for each in (suite, suite.with_protocol("paper")):
        found = find(each, places)
        if found.records:
            lines += measured_lines(found, places)
    if not lines:
        lines = [f"{suite.title}: no record yet. `kernel-attention reproduce {suite.name}` makes them.", ""]
    return lines


def measured_lines(found: Findings, places: Places) -> list[str]:
    """The figures of every row that has a record, with their origin."""
    suite = found.suite
    done = dict(facts(found))["models"]
    head = (
        f"{suite.title} ([suite `{suite.name}`](reproduction.md#{suite.name})), protocol `{suite.protocol}`"
    )
    lines = [f"{head}, {done} models:", ""]
    lines += table(*columns_of(suite, places))
    return [*lines, "", *markdown(record_table(found), record_table(found).rows)]


def columns_of(suite: Suite, places: Places) -> tuple[list[str], list[list[str]]]:
    """Head and lines of a suite's table: a column for each of its columns and figures that has a record."""
    metrics = list(suite.figures())
    measured = {metric: measurements(suite, places, metric) for metric in metrics}
    shown = [
        (column, metric)
        for column in suite.columns
        for metric in metrics
        if any(column in cells for cells in measured[metric].values())
    ]
    rows = [
        row for row in suite.rows if any(row in measured[each] and measured[each][row] for each in metrics)
    ]
    unit = {metric: ", %" if is_share(metric) else "" for metric in metrics}
    head = ["row", *(f"{column}: {metric_name(metric)}{unit[metric]}" for column, metric in shown)]
    lines = [
        [f"`{row}`", *(figure(measured[metric][row].get(column, {}), metric) for column, metric in shown)]
        for row in rows
    ]
    return head, lines


def figure(measured: dict[int, Measurement], metric: str) -> str:
    """Mean and sample deviation over the seeds, and the seeds; an accuracy in per cent."""
    if not measured:
        return ""
    unit = 100.0 if is_share(metric) else 1.0
    mean, deviation, seeds = spread(measured)
    text = f"{unit * mean:.2f}" if deviation is None else f"{unit * mean:.2f} ± {unit * deviation:.2f}"
    return f"{text} ({_seeds(seeds)})"


def _seeds(seeds: Sequence[int]) -> str:
    return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"
