"""The tables of docs/results.md, from the records of the suites that the page shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from generated import table
from reproduction_tables import markdown

from kernel_attention_lab.reporting.formats import format_seeds, is_share, metric_name
from kernel_attention_lab.reproduction import Findings, Places, Suite, find, read_suite
from kernel_attention_lab.reproduction.findings import Measured, measurements
from kernel_attention_lab.reproduction.page import facts, record_table
from kernel_attention_lab.results import Measurement, spread

PAGE = Path("docs/results.md")

SECTIONS = {
    "every-mechanism": ("every_mechanism",),
    "uea": (
        "primal_attention_uea", "primal_attention_uea_weights", "primal_dual_uea", "primal_dual_uea_more",
        "primal_dual_uea_linear", "primal_dual_uea_sparse",
    ),
    "thesis": ("multilinear_variants", "multilinear_equal_budget", "multilinear_equal_dimension"),
    "sentences": ("kernel_pca_sst2", "kernel_pca_sst2_finetune"),
    "language": ("kernel_pca_ptb",),
}  # fmt: skip
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
    for caption, piece in pieces(suite, places):
        lines += [*([f"{caption.capitalize()}:", ""] if caption else []), *piece, ""]
    origin = record_table(found)
    return [*lines, *markdown(origin, origin.rows)]


def pieces(suite: Suite, places: Places) -> Iterator[tuple[str, list[str]]]:
    """Tables of a suite's measurements, with a caption where there are several.

    Several data sets have a table for each figure, a single one has the figures side by side.
    """
    measured = {metric: measurements(suite, places, metric) for metric in suite.figures()}
    shown = {
        metric: [column for column in suite.columns if any(column in cells for cells in rows.values())]
        for metric, rows in measured.items()
    }
    pairs = [(column, metric) for metric, columns in shown.items() for column in columns]
    columns, metrics = ({pair[place] for pair in pairs} for place in (0, 1))
    if len(columns) == 1 or len(metrics) == 1:
        titles = [f"{column}: {metric_title(metric)}" for column, metric in pairs]
        yield "", figure_table(suite, measured, pairs, titles)
        return
    for metric, names in shown.items():
        if names:
            cells = [(name, metric) for name in names]
            yield metric_title(metric), figure_table(suite, measured, cells, names)


def figure_table(
    suite: Suite,
    measured: Mapping[str, Measured],
    shown: Sequence[tuple[str, str]],
    titles: Sequence[str],
) -> list[str]:
    """A line for each row that has a record, a column for each of these pairs of a data set and a figure."""
    lines = []
    for row in suite.rows:
        found = [(metric, measured[metric][row].get(column, {})) for column, metric in shown]
        seeds = len({seed for _, cell in found for seed in cell})
        if seeds:
            lines.append([f"`{row}`", str(seeds), *(figure(cell, metric, seeds) for metric, cell in found)])
    return table(["row", "seeds", *titles], lines)


def metric_title(metric: str) -> str:
    """The figure's name, with the unit of an accuracy."""
    return metric_name(metric) + (", %" if is_share(metric) else "")


def figure(measured: Mapping[int, Measurement], metric: str, seeds_of_row: int = 0) -> str:
    """Mean and sample deviation over the seeds; an accuracy in per cent.

    The seeds follow where they are not as many as those of the row.
    """
    if not measured:
        return ""
    unit = 100.0 if is_share(metric) else 1.0
    mean, deviation, seeds = spread(measured)
    text = f"{unit * mean:.2f}" if deviation is None else f"{unit * mean:.2f} ± {unit * deviation:.2f}"
    return text if len(seeds) == seeds_of_row else f"{text} ({format_seeds(seeds)})"
