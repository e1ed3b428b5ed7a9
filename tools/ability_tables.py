"""The tables and the figures of docs/abilities.md, from the suite ``abilities`` and its records."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from generated import NOTHING, table
from robustness_tables import cell

from kernel_attention_lab.reproduction import Cell, Suite, read_suite
from kernel_attention_lab.results import (
    Measurement,
    ResultRecord,
    read_records,
    require_same_config,
)
from kernel_attention_lab.training.position_recipe import PositionRecipe, point_name

PAGE = Path("docs/abilities.md")
FIGURES = Path("docs/figures")
RESULTS = Path("results")

Points: TypeAlias = dict[str, dict[str, dict[int, Measurement]]]
"""The accuracy by mechanism, test set and seed."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of every region of the page by its mark, and the files of the figures.

    Raises:
        SystemExit: for a record of a row that the suite does not have.
    """
    suite = read_suite("abilities")
    regions: dict[str, list[str]] = {}
    figures: dict[Path, str] = {}
    means: dict[str, dict[str, dict[int, Measurement]]] = {row: {} for row in suite.rows}
    for column in suite.columns:
        records = read_column(root, suite, column)
        for record in records:
            value = Measurement(record.figures["evaluation"][suite.metric])
            means[record.label].setdefault(column, {})[record.seed] = value
        titles = set_titles(suite, column)
        points = measured_points(records, suite.rows, titles)
        figure = FIGURES / f"abilities-{column.replace('_', '-')}.svg"
        regions[column] = task_lines(records, points, titles, figure)
        if records:
            figures[figure] = drawn(points, titles, list(suite.rows))
    regions["abilities-map"] = map_table(means, list(suite.columns))
    return regions, figures


def read_column(root: Path, suite: Suite, column: str) -> list[ResultRecord]:
    """The records of a task, which must be of the suite's rows and differ in the mechanism alone."""
    folder = RESULTS / suite.records / column
    records = read_records(root / folder)
    strange = sorted({record.label for record in records} - suite.rows.keys())
    if strange:
        raise SystemExit(f"{folder}: suite {suite.name} has no row {', '.join(strange)}")
    require_same_config(records, apart_from=("attention",))
    for row in suite.rows:
        require_same_config([record for record in records if record.label == row])
    return records


def set_titles(suite: Suite, column: str) -> dict[str, str]:
    """The title of every test set by its name: ``length 64, items 4``."""
    _, recipe = suite.recipe(Cell(next(iter(suite.rows)), column, suite.seeds[0]))
    assert isinstance(recipe, PositionRecipe)
    return {
        point_name(entry): ", ".join(f"{key} {value}" for key, value in entry.items())
        for entry in recipe.test_at or recipe.train_at
    }


def measured_points(
    records: Sequence[ResultRecord], rows: Mapping[str, object], titles: Mapping[str, str]
) -> Points:
    """The accuracy of every test set, rows in the order of the suite."""
    found: Points = {row: {} for row in rows}
    for record in records:
        for name in titles:
            value = Measurement(record.figures["evaluation"][f"accuracy_{name}"])
            found[record.label].setdefault(name, {})[record.seed] = value
    return {row: cells for row, cells in found.items() if cells}


def map_table(means: Points, columns: Sequence[str]) -> list[str]:
    """A line for each mechanism, a column for each task: means over the task's test sets."""
    lines = []
    for row, cells in means.items():
        seeds = len({seed for measured in cells.values() for seed in measured})
        if seeds:
            lines.append([f"`{row}`", str(seeds), *(cell(cells.get(name, {}), seeds) for name in columns)])
    titles = [name.replace("_", " ") for name in columns]
    return ["", *table(["mechanism", "seeds", *titles], lines), ""] if lines else NOTHING


def task_lines(
    records: Sequence[ResultRecord], points: Points, titles: Mapping[str, str], figure: Path
) -> list[str]:
    """What was trained, the figure and the table of a task."""
    if not records:
        return NOTHING
    seconds = [record.budget["seconds"] for record in records]
    machines = " and ".join(sorted({record.machine for record in records}))
    lines = []
    for row, cells in points.items():
        seeds = len({seed for measured in cells.values() for seed in measured})
        lines.append([f"`{row}`", str(seeds), *(cell(cells.get(name, {}), seeds) for name in titles)])
    name = figure.relative_to(PAGE.parent)
    return [
        "",
        f"{len(records)} models, {min(seconds):.0f} to {max(seconds):.0f} s of training each, {machines}.",
        "",
        f"![Accuracy on the test sets, a line for each mechanism]({name})",
        "",
        *table(["mechanism", "seeds", *titles.values()], lines),
        "",
    ]


def drawn(points: Points, titles: Mapping[str, str], rows: Sequence[str]) -> str:
    """Means over the seeds, with their range, against the test sets, as SVG."""
    from kernel_attention_lab.reporting.figures import (
        legend_below,
        panel_grid,
        report_style,
        seed_styles,
    )

    styles = dict(zip(rows, seed_styles(range(len(rows))).values(), strict=True))
    names = list(titles)
    buffer = io.StringIO()
    with report_style():
        figure, (axis,) = panel_grid(1, 3.6)
        for row, cells in points.items():
            at = [place for place, name in enumerate(names) if name in cells]
            each = [[100 * seed.value for seed in cells[names[place]].values()] for place in at]
            means = [sum(values) / len(values) for values in each]
            axis.plot(at, means, marker="o", markersize=3.5, label=row, **styles[row])
            axis.fill_between(
                at, list(map(min, each)), list(map(max, each)), color=styles[row]["color"], alpha=0.12
            )
        axis.set_xticks(range(len(names)), [title.replace(", ", "\n") for title in titles.values()])
        axis.set(ylabel="accuracy (%)", ylim=(-3, 103))
        legend_below(figure, axis)
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"
