"""The decision table at the end of docs/mechanisms/index.md: what the records say, situation by situation.

A line names what is measured and where. What to take, and every figure, comes from the records.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from ability_tables import set_titles
from generated import table

from kernel_attention_lab.reproduction import Cell, Places, Suite, read_suite
from kernel_attention_lab.reproduction.findings import suite_records
from kernel_attention_lab.results import ResultRecord, robustness_columns
from kernel_attention_lab.results.comparison import Measurement

PAGE = Path("docs/mechanisms/index.md")
NEAR = 0.01  # rows this near to the best are named with it: points of accuracy, or the share of an error

Figures = Mapping[str, Mapping[int, float]]
"""By row and seed."""
Records = Mapping[str, Mapping[int, ResultRecord]]
"""Those of one column, by row and seed."""

ABILITIES = {
    "mqar": "many keys, each asked for by name (associative recall)",
    "mqar_published": "a few keys of a large vocabulary, each asked for by name",
    "induction_heads": "one earlier place to find again (induction)",
    "selective_copying": "a few tokens to keep among blanks, in order",
    "long_range_copy": "a passage to copy over a long distance",
    "majority": "a count over the whole sequence",
    "parity": "the parity of the whole sequence",
    "noisy_retrieval": "retrieval by similarity where half of the stored keys are outliers",
}
EQUAL_TIME = {
    "Image": ("images as pixels, as many steps as the time allows", "1,024 tokens"),
    "Text": ("bytes of text to classify, as many steps as the time allows", "up to 2,048 tokens"),
    "ListOps-100": ("nested expressions, as many steps as the time allows", "31 to 99 tokens"),
    "Pathfinder-16": ("contours in images as pixels, as many steps as the time allows", "256 tokens"),
}
ROBUSTNESS = {
    "test": "small images as patches",
    "pgd": "the same under PGD with eps 1/255",
    "corruptions": "the same under 15 corruptions",
}

ANCHORS = {
    "mqar": "multi-query-associative-recall",
    "mqar_published": "associative-recall-with-a-large-vocabulary",
    "induction_heads": "induction-heads",
    "selective_copying": "selective-copying",
    "long_range_copy": "long-range-copy",
    "noisy_retrieval": "retrieval-among-noisy-keys",
    "Image": "image",
    "Text": "text",
    "ListOps-100": "listops-up-to-100-tokens",
    "Pathfinder-16": "pathfinder-16-x-16",
}


class Line(NamedTuple):
    """A situation.

    Attributes:
        data: of the user.
        length: of the sequences.
        budget: of a training.
        figures: what was measured, by row and seed.
        link: the page with the tables and figures, from the page of the table.
        is_share: whether the figures are shares, larger is better; else errors.
    """

    data: str
    length: str
    budget: str
    figures: Figures
    link: str
    is_share: bool = True


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the region of the page by its mark; there are no figures."""
    rows = [
        [line.data, line.length, line.budget, advice(line), evidence(line)]
        for line in lines(Places(root / "runs", root / "results"))
    ]
    head = ["your data", "length", "budget of a training", "take", "measured"]
    return {"decisions": ["", *table(head, rows), ""]}, {}


def lines(places: Places) -> Iterator[Line]:
    """Every situation that a suite stands for, measured or not."""
    abilities = read_suite("abilities")
    for column, data in ABILITIES.items():
        name, title = list(set_titles(abilities, column).items())[-1]  # the hardest set
        page = f"../abilities.md#{ANCHORS.get(column, column)}"
        yield _line(abilities, column, places, data, title, page, f"accuracy_{name}")
    equal_time = read_suite("equal_time")
    for column, (data, length) in EQUAL_TIME.items():
        page = f"../equal-time.md#{ANCHORS[column]}"
        yield _line(equal_time, column, places, data, length, page, "accuracy")
    yield from _robustness_lines(places)
    yield _series_line(places)
    suite = read_suite("kernel_pca_ptb")
    line = _line(suite, "PTB", places, "text, word by word", "64 words", "../reproduction.md", "perplexity")
    # A row with a learning rate of its own compares more than the mechanism.
    alike = {row: each for row, each in line.figures.items() if "learning_rate" not in suite.rows[row]}
    yield line._replace(figures=alike, is_share=False)


def advice(line: Line) -> str:
    """The rows within ``NEAR`` of the best; softmax where fewer than two rows were measured."""
    means = _means(line)
    if len(means) < 2:
        return "not measured yet; `softmax` until then"
    best = max(means.values()) if line.is_share else min(means.values())
    near = NEAR if line.is_share else NEAR * best
    taken = ", ".join(f"`{row}`" for row, mean in means.items() if abs(mean - best) <= near)
    return taken if all(len(line.figures[row]) > 1 for row in means) else f"{taken} (by one seed)"


def evidence(line: Line) -> str:
    """The mean of every row with the number of seeds, best first, and the link."""
    means = _means(line)
    if not means:
        return f"[nothing yet]({line.link})"
    ordered = sorted(means, key=lambda row: means[row], reverse=line.is_share)
    counts = {len(line.figures[row]) for row in means}
    said = [f"{row} {_number(means[row], line.is_share)}" for row in ordered]
    seeds = f"{min(counts)}" if len(counts) == 1 else f"{min(counts)} to {max(counts)}"
    unit = " %" if line.is_share else ""
    return f"[{', '.join(said)}{unit}, {seeds} seed{'' if counts == {1} else 's'}]({line.link})"


def _line(suite: Suite, column: str, places: Places, data: str, length: str, link: str, figure: str) -> Line:
    found = suite_records(suite, places)
    records = {row: cells[column] for row, cells in found.items() if column in cells}
    figures = {
        row: {seed: record.figures["evaluation"][figure] for seed, record in cells.items()}
        for row, cells in records.items()
    }
    every = [record for cells in records.values() for record in cells.values()]
    return Line(data, length, _budget(suite, column, every), figures, link)


def _robustness_lines(places: Places) -> Iterator[Line]:
    suite = read_suite("cifar10_robustness")
    (column,) = suite.columns
    found = suite_records(suite, places)
    records = {row: cells[column] for row, cells in found.items() if column in cells}
    every = [record for cells in records.values() for record in cells.values()]
    measured = robustness_columns(every)
    for name, data in ROBUSTNESS.items():
        figures = {row: _values(cells[name]) for row, cells in measured.items() if name in cells}
        yield Line(data, "64 tokens", _budget(suite, column, every), figures, "../robustness-results.md")


def _series_line(places: Places) -> Line:
    """The mean over the sets of series on which every row has every seed."""
    suite = read_suite("nested")
    found = suite_records(suite, places)
    complete = [
        column
        for column in suite.columns
        if all(len(found.get(row, {}).get(column, {})) == len(suite.seeds) for row in suite.rows)
    ]
    figures = {
        row: {
            seed: statistics.fmean(
                found[row][column][seed].figures["evaluation"]["accuracy"] for column in complete
            )
            for seed in suite.seeds
        }
        for row in suite.rows
        if complete
    }
    every = [record for cells in found.values() for column in complete for record in cells[column].values()]
    data, length = "series of several channels to classify", f"mean of {len(complete)} UEA sets"
    budget = _budget(suite, next(iter(suite.columns)), every)
    return Line(data, length, budget, figures, "../concepts/low-rank-attention.md#what-it-buys")


def _budget(suite: Suite, column: str, records: Iterable[ResultRecord]) -> str:
    """The limit of the recipe, the minutes of the records, or the recipe's steps where there are none."""
    _, recipe = suite.recipe(Cell(next(iter(suite.rows)), column, suite.seeds[0]))
    seconds = [record.budget["seconds"] for record in records]
    limit = getattr(recipe, "max_seconds", 0)
    if limit:
        return f"{limit / 60:g} min"
    if not seconds:
        return recipe.duration
    low, high = (max(1, round(each / 60)) for each in (min(seconds), max(seconds)))
    return f"{low} min" if low == high else f"{low} to {high} min"


def _means(line: Line) -> dict[str, float]:
    return {row: statistics.fmean(values.values()) for row, values in line.figures.items() if values}


def _values(cells: Mapping[int, Measurement]) -> dict[int, float]:
    return {seed: each.value for seed, each in cells.items()}


def _number(value: float, is_share: bool) -> str:
    return f"{100 * value:.1f}" if is_share else f"{value:.1f}"
