"""The tables of docs/control-results.md, from the suite ``primal_attention_d4rl`` and its records."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from generated import NOTHING, table
from performance_tables import read, said_of

from kernel_attention_lab.reproduction import Suite, read_suite
from kernel_attention_lab.results import ResultRecord, read_records, require_same_config

PAGE = Path("docs/control-results.md")
RESULTS = Path("results")
SCORE = "normalized_score"
TITLES = {
    "softmax": "softmax",
    "primal": "primal, last layer",
    "cloning": "behaviour cloning",
    "cloning_best_tenth": "cloning, best 10 %",
}
TRANSFORMERS = ("softmax", "primal")
RECORDED = {"data": "data", "best_data": "data, best 10 %", "random": "random"}

Records: TypeAlias = dict[str, dict[str, list[ResultRecord]]]
"""The records by column and row."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of every region of the page by its mark; there are no figures.

    Raises:
        SystemExit: for a record of a row that the suite does not have.
    """
    suite = read_suite("primal_attention_d4rl")
    found = {column: read_column(root, suite, column) for column in suite.columns}
    regions = {
        "control-scores": score_lines(suite, found),
        "control-targets": target_lines(found),
        "control-spread": spread_lines(found),
        "control-data": data_lines(found),
        "control-rollouts": rollout_lines(read(root, "rollouts")),
        "control-runs": run_lines(found),
    }
    return regions, {}


def read_column(root: Path, suite: Suite, column: str) -> dict[str, list[ResultRecord]]:
    """The records of a data set by row; those of one row differ in their seed alone."""
    folder = RESULTS / suite.records / column
    records = read_records(root / folder)
    strange = sorted({record.label for record in records} - suite.rows.keys())
    if strange:
        raise SystemExit(f"{folder}: suite {suite.name} has no row {', '.join(strange)}")
    require_same_config(records, apart_from=("attention", "best_fraction"))
    by_row: dict[str, list[ResultRecord]] = {}
    for row in suite.rows:
        of_row = [record for record in records if record.label == row]
        require_same_config(of_row)
        if of_row:
            by_row[row] = of_row
    return by_row


def score_lines(suite: Suite, found: Records) -> list[str]:
    """A line for each data set: mean and deviation over the seeds, beside the data and the paper."""
    lines = []
    for column, rows in found.items():
        if not rows:
            continue
        measured = [over_seeds(rows.get(row, []), SCORE) for row in TITLES]
        first = next(iter(rows.values()))
        paper = suite.reported["primal"].get(column)
        lines.append(
            [
                named(column),
                *measured,
                one_number(first, f"data_{SCORE}"),
                "" if paper is None else f"{paper}",
            ]
        )
    head = ["data", *TITLES.values(), "the data's mean", "paper (D4RL)"]
    return ["", *table(head, lines), ""] if lines else NOTHING


def spread_lines(found: Records) -> list[str]:
    """Deviation over the episodes of a seed, its mean over the seeds; and the steps of an episode."""
    lines = []
    for column, rows in found.items():
        cells = []
        for row in TITLES:
            values = rows.get(row, [])
            deviation = mean_of(values, f"{SCORE}_deviation")
            length = mean_of(values, "episode_length")
            cells.append("" if deviation is None or length is None else f"{deviation:.1f} ({length:.0f})")
        if any(cells):
            lines.append([named(column), *cells])
    return ["", *table(["data", *TITLES.values()], lines), ""] if lines else NOTHING


def target_lines(found: Records) -> list[str]:
    """The scores of each target that is asked for, and the loss on held-out episodes beside cloning's."""
    lines = []
    for column, rows in found.items():
        asked = [
            " / ".join(f"{value:.1f}" for value in target_scores(rows[row])) if row in rows else ""
            for row in TRANSFORMERS
        ]
        losses = [mean_of(rows.get(row, []), "loss") for row in (*TRANSFORMERS, "cloning")]
        if any(asked):
            cells = ["" if loss is None else f"{loss:.3f}" for loss in losses]
            lines.append([named(column), *asked, *cells])
    head = ["data", *(f"score, {TITLES[row]}" for row in TRANSFORMERS)]
    head += [f"loss, {TITLES[row]}" for row in (*TRANSFORMERS, "cloning")]
    return ["", *table(head, lines), ""] if lines else NOTHING


def target_scores(records: Sequence[ResultRecord]) -> list[float]:
    """The mean scores over the seeds, of the first target and then of the others."""
    others = {key for record in records for key in record.figures["evaluation"]}
    keys = [SCORE, *sorted(key for key in others if key.startswith(f"{SCORE}_target_"))]
    return [value for key in keys if (value := mean_of(records, key)) is not None]


def data_lines(found: Records) -> list[str]:
    """What needs no training: the recorded episodes, and random actions."""
    lines = []
    for column, rows in found.items():
        if rows:
            first = next(iter(rows.values()))
            lines.append([named(column), *(one_number(first, f"{key}_{SCORE}") for key in RECORDED)])
    return ["", *table(["data", *RECORDED.values()], lines), ""] if lines else NOTHING


def rollout_lines(record: dict[str, Any] | None) -> list[str]:
    """Steps per second: a line for each policy and context, a column for each length of the episode."""
    if record is None:
        return NOTHING
    rows: dict[tuple[str, int | None], list[str]] = {}
    for row in record["rows"]:
        cells = rows.setdefault((row["contender"], row["context"]), [])
        cells.append(f"{row['steps_per_second']:.0f}")
    lengths = dict.fromkeys(row["length"] for row in record["rows"])
    head = ["policy", "context", *(f"{length} steps" for length in lengths)]
    lines = [
        [name, "all" if context is None else str(context), *cells] for (name, context), cells in rows.items()
    ]
    said = f"{record['episodes']} episodes at once, one thread. {said_of(record['machine'])}."
    return ["", said, "", *table(head, lines), ""]


def run_lines(found: Records) -> list[str]:
    """How many models there are, how long they took, on what, with which simulator."""
    records = [record for rows in found.values() for each in rows.values() for record in each]
    if not records:
        return NOTHING
    seconds = [record.budget["seconds"] for record in records]
    evaluations = [record.figures["evaluation"] for record in records]
    return [
        "",
        f"{len(records)} models, {min(seconds):.0f} to {max(seconds):.0f} s of training each, "
        f"{several(record.machine for record in records)}; "
        f"{several(record.date[:10] for record in records)}; "
        f"code {several(code(record) for record in records)}; gymnasium "
        f"{several(str(figures.get('gymnasium')) for figures in evaluations)}, MuJoCo "
        f"{several(str(figures.get('mujoco')) for figures in evaluations)}; "
        f"{several(str(figures['episodes']) for figures in evaluations)} episodes of each model, memory "
        f"{several(str(figures['memory']) for figures in evaluations)}.",
        "",
    ]


def code(record: ResultRecord) -> str:
    """The short name of the code that trained a model."""
    return f"`{(record.revision or 'unknown')[:12]}`"


def over_seeds(records: Sequence[ResultRecord], key: str) -> str:
    """Mean and sample deviation over the seeds; how many, where they are fewer than three."""
    values = [float(record.figures["evaluation"][key]) for record in records]
    if not values:
        return ""
    count = "" if len(values) >= 3 else f" ({len(values)} seed{'s' if len(values) > 1 else ''})"
    spread = f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.1f}{spread}{count}"


def one_number(records: Sequence[ResultRecord], key: str) -> str:
    """A figure that is the same for every seed."""
    value = mean_of(records, key)
    return "" if value is None else f"{value:.1f}"


def mean_of(records: Sequence[ResultRecord], key: str) -> float | None:
    """The mean over the records that have the figure."""
    found = [record.figures["evaluation"].get(key) for record in records]
    values = [float(value) for value in found if isinstance(value, int | float)]
    return statistics.fmean(values) if values else None


def several(values: Iterable[str]) -> str:
    """Different values, joined."""
    return " and ".join(sorted(set(values)))


def named(column: str) -> str:
    """``hopper, medium-expert`` for ``hopper_medium_expert``."""
    environment, _, level = column.partition("_")
    return f"{environment}, {level.replace('_', '-')}"
