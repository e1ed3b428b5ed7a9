"""Suites as people read them: the page of one, and its tables on the screen.

The page has what its source reports beside what was measured, comparisons, and where the records are from.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.evidence.expressions import show
from kernel_attention_lab.evidence.findings import (
    FEWEST,
    NO_DIFFERENCE,
    SIGNIFICANT,
    Findings,
    Line,
    chance,
    column_sentence,
    column_verdict,
    verdict,
)
from kernel_attention_lab.evidence.plots import critical_difference
from kernel_attention_lab.evidence.records import ResultRecord
from kernel_attention_lab.evidence.run import Estimate, Places
from kernel_attention_lab.evidence.suite import Cell, Suite
from kernel_attention_lab.evidence.tables import text_cells
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import data_uri
from kernel_attention_lab.reporting.formats import (
    MISSING,
    format_duration,
    format_seeds,
    is_error,
    is_share,
    metric_name,
    sentence,
)
from kernel_attention_lab.reporting.tables import text_table
from kernel_attention_lab.tasks.recipe import PROTOCOLS

if TYPE_CHECKING:
    from rich.table import Table

PAGE_NAME = "report.html"

_OVER_COLUMNS = {
    "row": "{{ this.row }}",
    "baseline": "{{ this.baseline }}",
    "columns": "{{ this.differences | length }}",
    "larger": "{{ this.larger }}",
    "smaller": "{{ this.smaller }}",
    "mean difference": "{{ (unit * this.mean) | show('signed') }}",
    "p": "{{ this.p_value | show('chance') }}",
    "p (Holm)": "{{ this.adjusted | show('chance') }}",
    "finding": "{{ finding }}",
}
_OVER_CASES = {
    "row": "{{ this.row }}",
    "baseline": "{{ this.baseline }}",
    "column": "{{ this.column }}",
    "seeds": "{{ this.seeds | length }}",
    "difference": "{{ (unit * this.interval.difference) | show('signed') }}",
    "95 % interval": "{{ (unit * this.interval.low) | show('signed') }} to "
    "{{ (unit * this.interval.high) | show('signed') }}",
    "p": "{{ this.p_value | show('chance') }}",
    "p (Holm)": "{{ this.adjusted | show('chance') }}",
    "finding": "{{ finding }}",
}


def write_page(found: Findings, places: Places) -> Path:
    """Write ``report.html`` into the suite's folder of runs and return its path.

    Raises:
        InputError: where the page cannot be written.
    """
    text = suite_page(found)
    path = places.runs / found.suite.name / PAGE_NAME
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
    larger = found.suite.larger_is_better
    kinds = (
        (
            "Over the columns: Wilcoxon's signed-rank test, exact",
            _OVER_COLUMNS,
            [(each, column_verdict(each, larger)) for each in found.over_columns],
        ),
        (
            "On the same test cases: sign flip test over the cases",
            _OVER_CASES,
            [(each, verdict(each.adjusted, each.interval.difference, larger)) for each in found.over_cases],
        ),
    )
    unit = 100.0 if is_share(found.suite.metric) else 1.0
    return [
        html.Table(
            *text_cells(columns, ({"this": each, "finding": said, "unit": unit} for each, said in rows)),
            caption,
            numbers=True,
        )
        for caption, columns, rows in kinds
        if rows
    ]


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
    groups: dict[tuple[str, str, str], list[ResultRecord]] = {}
    for record in found.records:
        revision = (record.revision or "not known")[:12]
        origin = (record.machine, revision, record.software.get("torch", "not known"))
        groups.setdefault(origin, []).append(record)
    rows = []
    for origin, records in sorted(groups.items(), key=lambda group: group[0]):
        days = sorted({record.date[:10] for record in records})
        trained = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
        seconds = sum(float(record.budget.get("seconds") or 0.0) for record in records)
        rows.append([*origin, str(len(records)), trained, format_duration(seconds)])
    return html.Table(["machine", "revision", "PyTorch", "models", "trained", "training in all"], rows)


def _figure_table(suite: Suite, metric: str, lines: Iterable[Line]) -> html.Table:
    unit = ", %" if is_share(metric) else ""
    head = ["column", "row", f"reported{unit}", f"measured{unit}", "seeds", "difference"]
    rows = [
        [
            line.column,
            line.row,
            _spread(line.reported),
            _spread(line.measured),
            MISSING if line.measured is None else str(len(line.measured.seeds)),
            show(line.difference, "signed") or MISSING,
        ]
        for line in lines
    ]
    is_larger_better = is_share(metric) or (suite.larger_is_better and not is_error(metric))
    better = "larger" if is_larger_better else "smaller"
    caption = f"{sentence(metric_name(metric))} Mean ± deviation; {better} is better"
    return html.Table(head, rows, caption, numbers=True)


def _spread(found: Sequence[Any] | None) -> str:
    """Mean and deviation, the first two of what was found."""
    if found is None:
        return MISSING
    mean, deviation = found[:2]
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _comparison_pieces(found: Findings) -> list[html.Piece]:
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


# --- on the screen ------------------------------------------------------------------------------------------


def screen_tables(found: Findings) -> list[Table]:
    """The tables of figures, as on the page."""
    return [
        text_table(found.suite.title, piece.head, piece.rows, caption=piece.caption, right=range(2, 6))
        for piece in figure_tables(found)
    ]


def state_table(title: str, found: Sequence[Estimate]) -> Table:
    """The missing parts of the cells of a suite, with the training time that records tell.

    Seeds that lack the same share a row. ``missing_notes`` says what the numbers of the last column mean.
    """
    waiting = [entry for entry in found if not entry.state.is_done]
    done = f"{len(found) - len(waiting)} of {len(found)} are done"
    trainings = [entry for entry in waiting if entry.state.training]
    timed = [entry.seconds for entry in trainings if entry.seconds is not None and entry.difference is None]
    if timed:
        hours = f"take about {sum(timed) / 3600:.1f} hours"
        if len(timed) == len(trainings):
            done += f"; the trainings {hours}"
        else:
            done += f"; {len(timed)} of {len(trainings)} trainings {hours}, and no record tells of the others"
    numbers = {reason: f"({place})" for place, reason in enumerate(_reasons(found), start=1)}
    seeds: dict[tuple[str, str, str, str], list[str]] = {}
    for entry in waiting:
        cell = entry.state.cell
        alike = (cell.row, cell.column, _lacking(entry), numbers.get(entry.missing or "", ""))
        seeds.setdefault(alike, []).append(str(cell.seed))
    rows = [
        (row, column, ", ".join(listed), lacks, missing)
        for (row, column, lacks, missing), listed in seeds.items()
    ]
    return text_table(title, ("row", "column", "seeds", "lacks", "missing"), rows, caption=done, fold=True)


def missing_notes(found: Sequence[Estimate]) -> list[str]:
    """Why cells of a suite cannot run, each reason once, with its number in ``state_table``."""
    return [f"({place}) {reason}" for place, reason in enumerate(_reasons(found), start=1)]


def _reasons(found: Sequence[Estimate]) -> list[str]:
    return list(dict.fromkeys(entry.missing for entry in found if entry.missing))


def _minutes(seconds: float) -> str:
    return "under 1 min" if seconds < 30 else f"{seconds / 60:.0f} min"


def _lacking(entry: Estimate) -> str:
    """The missing parts of a cell, in words."""
    state, seconds, difference, _ = entry
    lacks = []
    if state.training:
        suffix = "" if difference is None else f" {difference}"
        lacks.append("training" if seconds is None else f"training ({_minutes(seconds)}{suffix})")
    if state.diagnosis:
        lacks.append("diagnostics")
    if state.steps:
        lacks.append(f"{len(state.steps)} attacks")
    return ", ".join([*lacks, *state.shifts])
