"""The page of a suite: reported beside measured, the comparisons, and where the records are from."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from pathlib import Path

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import writing
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    MISSING,
    format_duration,
    format_seeds,
    is_error,
    is_share,
    metric_name,
    sentence,
)
from kernel_attention_lab.reproduction.findings import (
    FEWEST,
    NO_DIFFERENCE,
    SIGNIFICANT,
    Findings,
    Line,
    chance,
    column_sentence,
    column_verdict,
    find,
    verdict,
)
from kernel_attention_lab.reproduction.run import Places
from kernel_attention_lab.reproduction.suite import Cell, Suite
from kernel_attention_lab.tasks.recipe import PROTOCOLS

PAGE_NAME = "report.html"


def write_page(suite: Suite, places: Places) -> Path:
    """Write ``report.html`` into the suite's folder of runs, from its records alone, and return its path.

    Raises:
        InputError: for a damaged record, and where the page cannot be written.
    """
    text = suite_page(find(suite, places))
    path = places.runs / suite.name / PAGE_NAME
    with writing(f"page {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    return path


def suite_page(found: Findings) -> str:
    """The page as text; it needs no other file and no network."""
    suite = found.suite
    sections = [
        html.Section("figures", "Reported and measured", figure_tables(found)),
        html.Section("baselines", "Against the baselines", _comparison_pieces(found)),
        html.Section("missing", "Missing", [html.Paragraph(line) for line in missing_lines(found)]),
        html.Section("records", "Records", [record_table(found), *_seed_pieces(found)]),
    ]
    sentences = (*map(sentence, suite.remarks),)
    opening: list[html.Piece] = [
        html.Facts(tuple(facts(found))),
        html.Notice("What the records say.", tuple(finding_lines(found))),
    ]
    if sentences:
        opening.append(html.Notice("To compare, note:", sentences))
    command = f"kernel-attention reproduce {shlex.quote(suite.name)}"
    return html.page(
        title=suite.title,
        lead=sentence(f"Compared with: {suite.source}"),
        opening=opening,
        sections=sections,
        footer=f"Written by {command} from the records of the suite. This page needs no network.",
    )


def facts(found: Findings) -> list[tuple[str, str]]:
    """Short facts: protocols, seeds, how many cells are done."""
    suite = found.suite
    cells = list(suite.cells())
    protocols = sorted(
        {str(record.config["protocol"]) for record in found.records if record.config.get("protocol")}
    )
    return [
        ("measured, protocol", ", ".join(protocols) or suite.protocol or "that of the recipes"),
        ("reported, protocol", suite.reported_protocol or "not stated"),
        ("seeds", ", ".join(map(str, suite.seeds))),
        ("models", f"{len(cells) - len(found.missing)} of {len(cells)}"),
    ]


def figure_tables(found: Findings) -> list[html.Table]:
    """A table for each figure: every row and column that has a record, and what the source reports there."""
    return [_figure_table(found.suite, metric, lines) for metric, lines in found.lines.items() if lines]


def finding_lines(found: Findings) -> list[str]:
    """The outcome in sentences: of the comparisons over the columns, and of those on the cases of one."""
    if not found.records:
        return ["No cell has a record yet."]
    if not found.over_columns and not found.over_cases:
        return ["No row can be compared with its baseline yet."]
    larger_is_better = found.suite.larger_is_better
    made = len(found.over_columns)
    lines = [column_sentence(each, made, larger_is_better, "columns") for each in found.over_columns]
    equal = 0
    for each in found.over_cases:
        said = verdict(each.adjusted, each.interval.difference, larger_is_better)
        equal += said == NO_DIFFERENCE
        if said != NO_DIFFERENCE:
            rows = f"{each.row} is {said} than {each.baseline}"
            lines.append(f"{rows} on the cases of {each.column} (p {chance(each.adjusted)}).")
    if equal:
        of_all = f"{equal} of {len(found.over_cases)} comparisons"
        lines.append(f"No difference found in {of_all} on the cases of one column.")
    return lines


def comparison_tables(found: Findings) -> list[html.Table]:
    """The comparisons over the columns, and those over the cases of a column."""
    suite = found.suite
    unit = 100.0 if is_share(suite.metric) else 1.0
    tables = []
    if found.over_columns:
        rows = [
            [
                each.row, each.baseline, str(len(each.differences)), str(each.larger), str(each.smaller),
                signed(unit * each.mean), _cell(each.p_value), _cell(each.adjusted),
                column_verdict(each, suite.larger_is_better),
            ]
            for each in found.over_columns
        ]  # fmt: skip
        head = [
            "row",
            "baseline",
            "columns",
            "larger",
            "smaller",
            "mean difference",
            "p",
            "p (Holm)",
            "finding",
        ]
        tables.append(
            html.Table(head, rows, "Over the columns: Wilcoxon's signed-rank test, exact", numbers=True)
        )
    if found.over_cases:
        rows = []
        for case in found.over_cases:
            difference, low, high = (unit * value for value in case.interval)
            rows.append(
                [
                    case.row, case.baseline, case.column, str(len(case.seeds)), signed(difference),
                    f"{signed(low)} to {signed(high)}", _cell(case.p_value), _cell(case.adjusted),
                    verdict(case.adjusted, case.interval.difference, suite.larger_is_better),
                ]
            )  # fmt: skip
        head = [
            "row",
            "baseline",
            "column",
            "seeds",
            "difference",
            "95 % interval",
            "p",
            "p (Holm)",
            "finding",
        ]
        tables.append(
            html.Table(head, rows, "On the same test cases: sign flip test over the cases", numbers=True)
        )
    return tables


def missing_lines(found: Findings) -> list[str]:
    """The cells without a record: first the columns without any, then the rest.

    Rows that lack the same share a line.
    """
    if not found.missing:
        return ["Every cell has a record."]
    suite, missing = found.suite, set(found.missing)
    lacking = {
        row: {
            column: [seed for seed in suite.seeds if Cell(row, column, seed) in missing]
            for column in suite.columns
        }
        for row in suite.rows
    }
    empty = [
        column
        for column in suite.columns
        if all(len(cells[column]) == len(suite.seeds) for cells in lacking.values())
    ]
    rows: dict[str, list[str]] = {}
    for row, cells in lacking.items():
        said = [f"{column} ({format_seeds(seeds)})" for column, seeds in cells.items()
                if seeds and column not in empty]  # fmt: skip
        rows.setdefault("; ".join(said), []).append(row)
    lines = [f"{', '.join(empty)}: every row and seed."] if empty else []
    return lines + [f"{', '.join(names)}: {said}." for said, names in rows.items() if said]


def record_table(found: Findings) -> html.Table:
    """Where the records are from: machine, revision, software, days, seconds."""
    groups: dict[tuple[str, str, str], list[tuple[str, float]]] = {}
    for record in found.records:
        origin = (
            record.machine,
            (record.revision or "not known")[:12],
            record.software.get("torch", "not known"),
        )
        groups.setdefault(origin, []).append((record.date[:10], float(record.budget.get("seconds") or 0.0)))
    rows = [
        [machine, revision, torch, str(len(entries)), _days(day for day, _ in entries),
         format_duration(sum(seconds for _, seconds in entries))]
        for (machine, revision, torch), entries in sorted(groups.items())
    ]  # fmt: skip
    return html.Table(["machine", "revision", "PyTorch", "models", "trained", "training in all"], rows)


def signed(value: float) -> str:
    """A difference with its sign."""
    return f"{value:+.2f}".replace("-", "−")


def _cell(p_value: float) -> str:
    return chance(p_value).removeprefix("= ")


def _figure_table(suite: Suite, metric: str, lines: Iterable[Line]) -> html.Table:
    unit = ", %" if is_share(metric) else ""
    head = ["column", "row", f"reported{unit}", f"measured{unit}", "seeds", "difference"]
    rows = []
    for line in lines:
        measured = line.measured
        rows.append(
            [
                line.column,
                line.row,
                MISSING if line.reported is None else _spread(*line.reported),
                MISSING if measured is None else _spread(measured.mean, measured.deviation),
                MISSING if measured is None else str(len(measured.seeds)),
                MISSING if line.difference is None else signed(line.difference),
            ]
        )
    is_larger_better = is_share(metric) or (suite.larger_is_better and not is_error(metric))
    better = "larger" if is_larger_better else "smaller"
    return html.Table(
        head, rows, f"{sentence(metric_name(metric))} Mean ± deviation; {better} is better", numbers=True
    )


def _comparison_pieces(found: Findings) -> list[html.Piece]:
    from kernel_attention_lab.reporting.figures import data_uri
    from kernel_attention_lab.reporting.suite_plots import critical_difference

    suite = found.suite
    pieces: list[html.Piece] = [*comparison_tables(found)]
    if not pieces:
        pieces.append(html.Paragraph("No row can be compared with its baseline yet."))
    figure = None
    if found.scores:
        figure = critical_difference(found.scores, larger_is_better=suite.larger_is_better, alpha=SIGNIFICANT)
    if figure is None:
        why = (
            "all rows have the same figures"
            if found.scores
            else f"it needs {FEWEST} rows in {FEWEST} columns"
        )
        return [*pieces, html.Paragraph(f"No critical-difference diagram: {why}.", muted=True)]
    columns = len(next(iter(found.scores.values())))
    caption = (
        f"Mean ranks over {columns} columns, the best on the right. Bars join rows between which no "
        f"difference is found (Friedman's test, then Wilcoxon's with Holm's adjustment, {SIGNIFICANT:g})."
    )
    picture = html.Picture(data_uri(figure), f"Mean ranks of {len(found.scores)} rows.", caption, wide=True)
    return [*pieces, html.Pictures([picture])]


def _seed_pieces(found: Findings) -> list[html.Piece]:
    suite = found.suite
    unit = 100.0 if is_share(suite.metric) else 1.0
    rows = []
    for record in found.records:
        value = record.single_figures.get(suite.metric)
        seconds = format_duration(record.budget.get("seconds"))
        shown = MISSING if value is None else f"{unit * float(value):.2f}"
        rows.append([record.label, record.recipe, str(record.seed), shown, seconds])
    if not rows:
        return []
    table = html.Table(["row", "recipe", "seed", metric_name(suite.metric), "training"], rows, numbers=True)
    said = [html.Paragraph(f"{name}: {sentence(text)}", muted=True) for name, text in PROTOCOLS.items()]
    return [html.Folded("Every seed", [table]), html.Folded("The protocols", said)]


def _spread(mean: float, deviation: float | None) -> str:
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _days(days: Iterable[str]) -> str:
    found = sorted(set(days))
    return found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
