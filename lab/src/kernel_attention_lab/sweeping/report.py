"""The report of a sweep: a table on the screen, and a page with Optuna's pictures."""

from __future__ import annotations

import shlex
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernel_attention.errors import writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.plugins import loaded_plugins
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    attention_details,
    column_name,
    format_seeds,
    format_spread,
    format_value,
    sentence,
)
from kernel_attention_lab.reporting.tables import text_table
from kernel_attention_lab.sweeping.study import STATES, SweepFolder, SweepPoint

if TYPE_CHECKING:
    from rich.table import Table

BEST = 10  # points of the first table
_KEYS = 5  # whose pairs are drawn
_ROWS = 20  # of the table on the screen


def sweep_table(sweep: SweepFolder) -> Table:
    """The points that have begun, and the best ones, at most 20 together; the counts below."""
    points = sweep.points()
    counted = ((sum(point.state == state for point in points), state) for state in STATES)
    counts = ", ".join(f"{count} {state}" for count, state in counted if count)
    begun = [point for point in points if point.state == "begun"][:_ROWS]
    rows = _rows(sweep, begun + ranked(sweep, points)[: _ROWS - len(begun)])
    protocol = sweep.plan.example().protocol
    title = f"sweep of {sweep.plan.recipe}: {_metric_text(sweep)}, {protocol}"
    return text_table(title, _head(sweep), rows, caption=f"{len(points)} points: {counts}", fold=True)


def ranked(sweep: SweepFolder, points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """The complete points, the best first; among equals the first one."""
    done = [point for point in points if point.value is not None]
    return sorted(done, key=lambda point: point.value or 0.0, reverse=sweep.plan.metric.larger_is_better)


def resume_command(folder: Path) -> str:
    """The command that goes on with a sweep, on this machine or on another that sees the folder."""
    plugins = "".join(f" --plugin {name}" for name in loaded_plugins())
    return f"kernel-attention sweep --resume {shlex.quote(str(folder))}{plugins}"


def write_sweep_report(sweep: SweepFolder, path: Path) -> Path:
    """Write the page of a sweep, finished or not, as one file without scripts, and return its path.

    Raises:
        InputError: where the file cannot be written.
    """
    with writing(f"report {path}"):
        write_text_atomically(path, _page(sweep))
    return path


def _page(sweep: SweepFolder) -> str:
    plan, points = sweep.plan, sweep.points()
    recipe, best = plan.example(), ranked(sweep, points)
    table = html.Table(_head(sweep), _rows(sweep, points), numbers=True)
    sections = []
    if best:
        rows = html.Table(_head(sweep), _rows(sweep, best[:BEST]), numbers=True)
        sections = [html.Section("best", "The best points", [rows]), *_pictures(sweep)]
    everything = html.Folded("The value of every point", [table]) if len(points) > 30 else table
    sections.append(html.Section("points", "All points", [everything]))
    if failed := [[str(point.number), str(point.error)] for point in points if point.state == "failed"]:
        rows = html.Table(("point", "reason"), failed)
        sections.append(html.Section("failed", "Points that failed", [rows]))
    facts = html.Facts(
        (
            ("recipe", plan.recipe),
            ("sampler", plan.sampler),
            ("seed of the sampler", str(plan.sampler_seed)),
            ("seeds of a point", ", ".join(map(str, recipe.seeds))),
        )
    )
    space = html.Table(
        ("key", "values"), [[key, _entry_text(key, entry)] for key, entry in plan.space.items()]
    )
    command = html.Code(resume_command(sweep.folder), wrap=True)
    return html.page(
        title=f"Sweep of {plan.recipe} on {recipe.dataset}",
        lead=f"{plan.sampler} · {len(points)} points · {format_seeds(recipe.seeds)} each",
        opening=_opening(sweep, best),
        sections=[*sections, html.Section("space", "The space", [facts, space, command])],
        footer="Written by kernel-attention from the study of the sweep folder. This page needs no network.",
    )


def _opening(sweep: SweepFolder, best: Sequence[SweepPoint]) -> list[html.Piece]:
    pieces: list[html.Piece] = []
    recipe = sweep.plan.example()
    if best:
        chosen = ", ".join(f"{key} {_key_text(key, value)}" for key, value in best[0].keys.items())
        said = f"{_metric_text(sweep)} of point {best[0].number}: {chosen}"
        protocol = sentence(f"{recipe.protocol}: {recipe.protocol_text}")
        pieces.append(html.Result(_value_text(sweep, best[0]), said, protocol))
    if left := len(sweep.unfinished()):
        text = f"{left} of {sweep.plan.points} points are not finished. Go on with:"
        pieces.append(html.Notice(text, (resume_command(sweep.folder),)))
    if best and recipe.protocol == "holdout":
        text = (
            "Points are compared on validation cases alone. The best of many points is the best by luck too, "
            "so its validation figure is optimistic; its test figure is in its own report."
        )
        pieces.append(html.Paragraph(text, muted=True))
    elif best:
        text = "Points are compared on the cases that are reported: the best figure is optimistic."
        pieces.append(html.Notice(text))
    return pieces


def _pictures(sweep: SweepFolder) -> list[html.Section]:
    """The shares of the keys, each key alone, the order of the points, and the keys in pairs."""
    from optuna.visualization.matplotlib import plot_optimization_history, plot_rank, plot_slice

    keys = list(sweep.plan.space)
    pieces: list[html.Piece] = []
    shares = sweep.importances() or {}
    if shares:
        rows = [[key, f"{100 * share:.0f} %"] for key, share in shares.items()]
        caption = "Share of each key in the variance of the metric (fANOVA)"
        pieces.append(html.Table(("key", "share"), rows, caption, numbers=True))
    draw = partial(_picture, sweep)
    alone = [draw(partial(plot_slice, params=[key]), f"{key}: a dot for every point") for key in keys]
    alone.append(draw(plot_optimization_history, "The order of the points, and the best one so far"))
    sections = [html.Section("keys", "Each key alone", [*pieces, html.Pictures(alone, pair=True)])]
    pairs = combinations(sorted(keys, key=lambda key: -shares.get(key, 0.0))[:_KEYS], 2)
    together = [
        draw(partial(plot_rank, params=list(pair)), f"{' and '.join(pair)}: a dot for every point")
        for pair in pairs
    ]
    if together:
        pictures = html.Pictures(together, pair=len(together) > 1)
        sections.append(html.Section("interactions", "Keys together", [pictures]))
    return sections


def _picture(sweep: SweepFolder, plot: Callable[..., Any], caption: str) -> html.Picture:
    from matplotlib import pyplot

    from kernel_attention_lab.reporting.figures import data_uri, report_style

    with report_style(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # plots of Optuna's are experimental
        figure = plot(sweep.study, target_name=_metric_text(sweep)).figure
        axes = figure.axes[0]
        axes.set_title("")
        for axis in (axes.xaxis, axes.yaxis):
            labels = [label.get_text() for label in axis.get_ticklabels()]
            if any('"' in label for label in labels):  # values as the study names them, in JSON
                axis.set_ticks(axis.get_ticklocs(), [label.strip("'\"") for label in labels])
        uri = data_uri(figure)
        pyplot.close(figure)
    return html.Picture(uri, f"{_metric_text(sweep)}. {caption}.", caption)


def _head(sweep: SweepFolder) -> tuple[str, ...]:
    return ("point", *sweep.plan.space, _metric_text(sweep))


def _rows(sweep: SweepFolder, points: Sequence[SweepPoint]) -> list[list[str]]:
    return [
        [
            str(point.number),
            *(_key_text(key, point.keys[key]) if key in point.keys else "" for key in sweep.plan.space),
            _value_text(sweep, point),
        ]
        for point in points
    ]


def _metric_text(sweep: SweepFolder) -> str:
    """The metric in words."""
    recipe = sweep.plan.example()
    split = "validation" if recipe.protocol == "holdout" else recipe.reported_split
    return column_name(sweep.plan.metric.name, split)


def _value_text(sweep: SweepFolder, point: SweepPoint) -> str:
    """A point's mean and deviation over the seeds, or its state."""
    if point.value is None:
        return point.state
    deviation = statistics.stdev(point.values) if len(point.values) > 1 else None
    return format_spread(sweep.plan.metric.name, point.value, deviation)


def _key_text(key: str, value: Any) -> str:
    """A key's value on one line."""
    return attention_details(value) if key == "attention" else format_value(value)


def _entry_text(key: str, entry: list[Any] | dict[str, Any]) -> str:
    if isinstance(entry, list):
        return "; ".join(_key_text(key, value) for value in entry)
    text = f"from {format_value(entry['low'])} to {format_value(entry['high'])}"
    if entry["log"]:
        text += ", uniform in the logarithm"
    return text if entry["step"] is None else f"{text} in steps of {format_value(entry['step'])}"
