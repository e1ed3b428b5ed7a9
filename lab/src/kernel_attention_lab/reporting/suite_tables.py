"""A suite on the screen: what it lacks, and what was measured beside what was reported."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernel_attention_lab.reporting.formats import MISSING, format_metric
from kernel_attention_lab.reporting.tables import text_table
from kernel_attention_lab.results import Measurement, spread

if TYPE_CHECKING:
    from rich.table import Table


def state_table(title: str, found: Sequence[Any]) -> Table:
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
        alike = (cell.row, cell.column, _lacking(entry), numbers.get(entry.missing, ""))
        seeds.setdefault(alike, []).append(str(cell.seed))
    rows = [
        (row, column, ", ".join(listed), lacks, missing)
        for (row, column, lacks, missing), listed in seeds.items()
    ]
    return text_table(title, ("row", "column", "seeds", "lacks", "missing"), rows, caption=done, fold=True)


def missing_notes(found: Sequence[Any]) -> list[str]:
    """Why cells of a suite cannot run, each reason once, with its number in ``state_table``."""
    return [f"({place}) {reason}" for place, reason in enumerate(_reasons(found), start=1)]


def _reasons(found: Sequence[Any]) -> list[str]:
    return list(dict.fromkeys(entry.missing for entry in found if entry.missing))


def _minutes(seconds: float) -> str:
    return "under 1 min" if seconds < 30 else f"{seconds / 60:.0f} min"


def _lacking(entry: Any) -> str:
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


def suite_table(
    title: str,
    metric: str,
    columns: Iterable[str],
    measured: Mapping[str, Mapping[str, Mapping[int, Measurement]]],
    reported: Mapping[str, Mapping[str, float | Sequence[float]]],
) -> Table:
    """Means and deviations over seeds by row and column, and below each what the source reports."""
    caption = f"{metric}: mean ± sample deviation (number of seeds); in brackets: reported"
    names, rows = list(columns), []
    for row, found in measured.items():
        cells = []
        for name in names:
            lines = [_measured(metric, found[name])] if found.get(name) else [MISSING]
            if name in reported.get(row, {}):
                lines.append(f"({_reported(reported[row][name])})")
            cells.append("\n".join(lines))
        rows.append((row, *cells))
    return text_table(title, ["row", *names], rows, caption=caption, right=range(1, len(names) + 1))


def _measured(metric: str, by_seed: Mapping[int, Measurement]) -> str:
    mean, deviation, seeds = spread(by_seed)
    text = format_metric(metric, mean)
    if deviation is not None:
        text += f" ± {format_metric(metric, deviation)}"
    return f"{text} ({len(seeds)})"


def _reported(value: float | Sequence[float]) -> str:
    return f"{value:g}" if isinstance(value, int | float) else " ± ".join(f"{each:g}" for each in value)
