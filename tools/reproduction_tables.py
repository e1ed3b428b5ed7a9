"""The tables and the figures of docs/reproduction.md, from the records of the suites in results/."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from generated import svg_text, table

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.suite_plots import critical_difference
from kernel_attention_lab.reproduction import Findings, Places, Suite, find, list_suites, read_suite
from kernel_attention_lab.reproduction.findings import SIGNIFICANT
from kernel_attention_lab.reproduction.page import (
    comparison_tables,
    facts,
    figure_tables,
    finding_lines,
    missing_lines,
    record_table,
)
from kernel_attention_lab.training.recipe import PROTOCOLS

PAGE = Path("docs/reproduction.md")
FIGURES = Path("docs/figures")
EMPTY = ["", "No cell of a suite has a record yet.", ""]


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks, and the files of the figures."""
    places = Places(root / "runs", root / "results")
    overview, sections, figures = [], [""], {}
    for suite in suites(root):
        found = find(suite, places)
        done = dict(facts(found))["models"]
        name = f"[`{suite.name}`](#{suite.name})" if found.records else f"`{suite.name}`"
        overview.append([name, suite.source, suite.protocol or "the recipes'", done])
        if found.records:
            path = FIGURES / f"ranks-{suite.name}.svg"
            svg = ranks_figure(found)
            figures |= {} if svg is None else {path: svg}
            sections += [*section(found, None if svg is None else path), ""]
    head = ["suite", "compared with", "protocol", "models"]
    regions = {
        "suites": ["", *table(head, overview), ""],
        "findings": sections if len(sections) > 1 else EMPTY,
    }
    return regions, figures


def suites(root: Path) -> Iterator[Suite]:
    """Every shipped suite, and after it the same under another protocol where that has records."""
    for name in list_suites():
        suite = read_suite(name)
        yield suite
        for protocol in PROTOCOLS:
            other = suite.with_protocol(protocol)
            if other is not suite and (root / "results" / other.records).is_dir():
                yield other


def section(found: Findings, figure: Path | None) -> list[str]:
    """A suite's findings, its figures, comparisons, remarks, records and what lacks."""
    suite = found.suite
    lines = [f"## {suite.title} {{ #{suite.name} }}", "", f"Compared with: {suite.source}.", ""]
    lines += [f"* {name}: {value}" for name, value in facts(found)]
    lines += ["", "What the records say:", "", *(f"* {line}" for line in finding_lines(found)), ""]
    measured = {(line.column, line.row) for each in found.lines.values() for line in each if line.measured}
    for each in figure_tables(found):
        rows = [row for row in each.rows if (row[0], row[1]) in measured]
        lines += markdown(each, rows)
    for each in comparison_tables(found):
        lines += markdown(each, each.rows)
    if figure is not None:
        lines += [f"![Mean ranks of the rows]({figure.relative_to(PAGE.parent).as_posix()})", ""]
    lines += [*(f"* {remark}" for remark in suite.remarks), ""]
    lines += markdown(record_table(found), record_table(found).rows)
    missing = missing_lines(found)
    return (
        [*lines, "Without a record yet:", "", *(f"* {line}" for line in missing)]
        if found.missing
        else lines[:-1]
    )


def markdown(piece: html.Table, rows: list[list[str]]) -> list[str]:
    """A table of the page, with its caption above it."""
    caption = [f"{piece.caption}.", ""] if piece.caption else []
    return [*caption, *table(piece.head, ([cell.replace("|", "\\|") for cell in row] for row in rows)), ""]


def ranks_figure(found: Findings) -> str | None:
    """The critical-difference diagram as SVG; None where there is none."""
    if not found.scores:
        return None
    figure = critical_difference(
        found.scores, larger_is_better=found.suite.larger_is_better, alpha=SIGNIFICANT
    )
    return None if figure is None else svg_text(figure)
