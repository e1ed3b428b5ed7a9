"""The tables and the figures of docs/equal-time.md, from the suites equal_time and equal_time_search."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from generated import NOTHING, table
from robustness_tables import cell

from kernel_attention_lab.reproduction import Cell, Places, Suite, read_suite
from kernel_attention_lab.reproduction.findings import suite_records
from kernel_attention_lab.results import Measurement, ResultRecord
from kernel_attention_lab.training.recipe import StepRecipe

PAGE = Path("docs/equal-time.md")
FIGURES = Path("docs/figures")
SHARES = (1 / 8, 1 / 4, 1 / 2, 1)  # of the time, columns of the table; training ends a little after its limit

Records = dict[str, dict[str, dict[int, ResultRecord]]]
"""By row, column and seed."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks, and the files of the figures."""
    places = Places(root / "runs", root / "results")
    suite, search = read_suite("equal_time"), read_suite("equal_time_search")
    records, tried = suite_records(suite, places), suite_records(search, places)
    regions: dict[str, list[str]] = {}
    figures: dict[Path, str] = {}
    for column in suite.columns:
        path = FIGURES / f"equal-time-{column.lower()}.svg"
        trained = {row: cells[column] for row, cells in records.items() if column in cells}
        regions[mark(column)] = column_lines(suite, column, trained, path)
        if trained:
            figures[path] = drawn(trained, list(suite.rows))
    regions["equal-time-search"] = search_lines(suite, search, tried)
    return regions, figures


def mark(column: str) -> str:
    """The mark of a column's region."""
    return f"equal-time-{column.lower()}"


def course(record: ResultRecord, against: str = "training_seconds") -> list[tuple[float, float]]:
    """(seconds of training or steps, best validation accuracy so far) after every evaluation."""
    found = record.figures["course"]
    points, best = [], 0.0
    for at, accuracy in zip(found[against], found["val_accuracy"], strict=True):
        best = max(best, accuracy)
        points.append((at, best))
    return points


def within(cells: Mapping[int, ResultRecord], limit: float, against: str) -> dict[int, Measurement]:
    """By seed, the best validation accuracy within this time or number of steps, where there is one."""
    found = {}
    for seed, record in cells.items():
        reached = [accuracy for at, accuracy in course(record, against) if at <= limit]
        if reached:
            found[seed] = Measurement(reached[-1])
    return found


def learnt(cells: Mapping[int, ResultRecord]) -> dict[int, Measurement]:
    """By seed, the accuracy on the training batches before the last evaluation, where the record keeps it."""
    courses = {seed: record.figures["course"].get("train_accuracy") for seed, record in cells.items()}
    return {seed: Measurement(found[-1]) for seed, found in courses.items() if found}


def column_lines(
    suite: Suite, column: str, trained: Mapping[str, Mapping[int, ResultRecord]], figure: Path
) -> list[str]:
    """What was trained, the figure and the table of a column."""
    if not trained:
        return NOTHING
    limit = limit_of(suite, column)
    records = [record for cells in trained.values() for record in cells.values()]
    machines = " and ".join(sorted({record.machine for record in records}))
    least = min(_steps(record) for record in records)
    heads = [f"validation, {limit * share / 60:g} min" for share in SHARES]
    heads += [f"validation, {least:,} steps", "training, at the end"]
    lines = []
    for row, cells in trained.items():
        rates = sorted({record.config["learning_rate"] for record in cells.values()})
        steps = [_steps(record) for record in cells.values()]
        times = [share * limit if share < 1 else math.inf for share in SHARES]
        after = [within(cells, seconds, "training_seconds") for seconds in times]
        after += [within(cells, least, "step"), learnt(cells)]
        tested = {seed: Measurement(each.figures["evaluation"]["accuracy"]) for seed, each in cells.items()}
        lines.append(
            [
                f"`{row}`", str(len(cells)), ", ".join(f"{rate:g}" for rate in rates),
                _least_to_most(steps), *(cell(values, len(cells)) for values in after),
                cell(tested, len(cells)),
            ]
        )  # fmt: skip
    return [
        "",
        f"{len(records)} models, {machines}.",
        "",
        f"![Validation accuracy against the time of training]({figure.relative_to(PAGE.parent)})",
        "",
        *table(["attention", "seeds", "learning rate", "steps", *heads, "test"], lines),
        "",
    ]


def limit_of(suite: Suite, column: str) -> float:
    """The seconds of a training."""
    _, recipe = suite.recipe(Cell(next(iter(suite.rows)), column, suite.seeds[0]))
    assert isinstance(recipe, StepRecipe)
    return recipe.max_seconds


def best_rates(suite: Suite, search: Suite, tried: Records) -> dict[str, dict[str, float]]:
    """The learning rate with the best validation accuracy by mechanism and column, where all were tried.

    Among equals it is that of the suite.
    """
    found: dict[str, dict[str, float]] = {}
    for column in search.columns:
        values: dict[str, dict[float, float]] = {}
        for row in search.rows:
            name, rate = split(row)
            for record in tried[row].get(column, {}).values():
                values.setdefault(name, {})[rate] = record.single_figures[search.metric]
        for name, by_rate in values.items():
            if len(by_rate) == sum(split(row)[0] == name for row in search.rows):
                own = suite_rate(suite, name, column)
                ranks = {rate: (value, rate == own) for rate, value in by_rate.items()}
                found.setdefault(name, {})[column] = max(ranks, key=lambda rate: ranks[rate])
    return found


def split(row: str) -> tuple[str, float]:
    """Mechanism and learning rate of a row of the search."""
    name, rate = row.rsplit("_", 1)
    return name, float(rate)


def suite_rate(suite: Suite, row: str, column: str) -> float:
    """The learning rate that the suite has for a cell."""
    return suite.recipe(Cell(row, column, suite.seeds[0]))[1].learning_rate


def search_lines(suite: Suite, search: Suite, tried: Records) -> list[str]:
    """Best validation accuracies of the search, the chosen ones bold; and where the suite has another."""
    rates = sorted({split(row)[1] for row in search.rows})
    chosen = best_rates(suite, search, tried)
    lines, differing = [], []
    for column in search.columns:
        for name in dict.fromkeys(split(row)[0] for row in search.rows):
            cells = []
            for row in (row for row in search.rows if split(row)[0] == name):
                found = tried[row].get(column, {}).values()
                values = [record.single_figures[search.metric] for record in found]
                text = f"{100 * max(values):.1f}" if values else ""
                is_chosen = chosen.get(name, {}).get(column) == split(row)[1]
                cells.append(f"**{text}**" if is_chosen else text)
            if any(cells):
                lines.append([column, f"`{name}`", *cells])
            rate = chosen.get(name, {}).get(column)
            if rate is not None and rate != suite_rate(suite, name, column):
                differing.append(f"`{name}` on {column} ({rate:g})")
    if not lines:
        return NOTHING
    lacking = f"The suite does not have the rate that the search chose for {', '.join(differing)}."
    said = [lacking, ""] if differing else []
    return ["", *table(["task", "attention", *(f"{rate:g}" for rate in rates)], lines), "", *said]


def drawn(trained: Mapping[str, Mapping[int, ResultRecord]], rows: Sequence[str]) -> str:
    """The courses of all seeds, a colour for each mechanism, as SVG."""
    from kernel_attention_lab.reporting.figures import (
        legend_below,
        panel_grid,
        report_style,
        seed_styles,
    )

    styles = dict(zip(rows, seed_styles(range(len(rows))).values(), strict=True))
    buffer = io.StringIO()
    with report_style():
        figure, (axis,) = panel_grid(1, 3.6)
        for row, cells in trained.items():
            for number, record in enumerate(cells.values()):
                seconds, accuracies = zip(*course(record), strict=True)
                axis.plot(
                    [at / 60 for at in seconds], [100 * value for value in accuracies],
                    label=None if number else row, **styles[row],
                )  # fmt: skip
        axis.set(xlabel="minutes of training", ylabel="best validation accuracy (%)")
        legend_below(figure, axis)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"


def _steps(record: ResultRecord) -> int:
    return record.figures["course"]["step"][-1]


def _least_to_most(counts: Sequence[int]) -> str:
    least, most = min(counts), max(counts)
    return f"{least:,}" if least == most else f"{least:,} to {most:,}"
