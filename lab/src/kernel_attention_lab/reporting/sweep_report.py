"""The page of a sweep: the best points, every point's value, and how the keys act together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

from kernel_attention.atomic import write_text_atomically
from kernel_attention.errors import writing
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    format_seeds,
    format_value,
    sentence,
)
from kernel_attention_lab.reporting.sweep_record import (
    SweepPoint,
    SweepRecord,
    key_text,
    point_value,
)

BEST = 10  # points of the first table
KEYS = 5  # whose pairs are drawn


def write_sweep_report(record: SweepRecord, path: Path) -> Path:
    """Write the page of a sweep, finished or not, as one file without scripts, and return its path.

    Raises:
        InputError: where the file cannot be written.
    """
    with writing(f"report {path}"):
        write_text_atomically(path, render_sweep(record))
    return path


def render_sweep(record: SweepRecord) -> str:
    """The page as text."""
    sections = [_best(record), _alone(record), _together(record), _all(record), _failures(record)]
    return html.page(
        title=f"Sweep of {record.recipe} on {record.dataset}",
        lead=f"{record.sampler} · {len(record.points)} points · {format_seeds(record.seeds)} each",
        opening=_opening(record),
        sections=[*(section for section in sections if section is not None), _plan(record)],
        footer="Written by kernel-attention from the study of the sweep folder. This page needs no network.",
    )


def _opening(record: SweepRecord) -> list[html.Piece]:
    pieces: list[html.Piece] = []
    ranked = record.ranked()
    if ranked:
        best = ranked[0]
        chosen = ", ".join(f"{key} {key_text(key, value)}" for key, value in best.keys.items())
        pieces.append(
            html.Result(
                point_value(record, best),
                f"{record.metric_text} of point {best.number}: {chosen}",
                sentence(f"{record.protocol}: {record.protocol_text}"),
            )
        )
    left = record.count("waiting") + record.count("begun")
    if left:
        pieces.append(
            html.Notice(
                f"{left} of {len(record.points)} points are not finished. Go on with:", (record.command,)
            )
        )
    if record.protocol == "holdout" and ranked:
        text = (
            "Points are compared on validation cases alone. The best of many points is the best by luck too, "
            "so its validation figure is optimistic; its test figure is in its own report."
        )
        pieces.append(html.Paragraph(text, muted=True))
    elif ranked:
        pieces.append(
            html.Notice("Points are compared on the cases that are reported: the best figure is optimistic.")
        )
    return pieces


def _best(record: SweepRecord) -> html.Section | None:
    ranked = record.ranked()[:BEST]
    if not ranked:
        return None
    return html.Section("best", "The best points", [_table(record, ranked)])


def _alone(record: SweepRecord) -> html.Section | None:
    """One picture for each key, the shares of the keys, and the course of the sweep."""
    from kernel_attention_lab.reporting import sweep_plots
    from kernel_attention_lab.reporting.figures import data_uri

    if not record.ranked():
        return None
    pieces: list[html.Piece] = []
    if record.importances:
        rows = [[key, f"{100 * share:.0f} %"] for key, share in record.importances.items()]
        caption = "Share of each key in the variance of the metric (fANOVA)"
        pieces.append(html.Table(("key", "share"), rows, caption, numbers=True))
    pictures = [
        html.Picture(
            data_uri(sweep_plots.against_key(record, key)),
            f"Points: {record.metric_text} against {key}.",
            f"{key}: a dot for every point" + _through_means(record, key),
        )
        for key in record.space
    ]
    course = html.Picture(
        data_uri(sweep_plots.course(record)),
        f"Points: {record.metric_text} by number of the point, with the best one so far.",
        "The order of the points",
    )
    pieces.append(html.Pictures([*pictures, course], pair=True))
    return html.Section("keys", "Each key alone", pieces)


def _through_means(record: SweepRecord, key: str) -> str:
    return ", and the mean at every value" if isinstance(record.space[key], list) else ""


def _together(record: SweepRecord) -> html.Section | None:
    """A picture for each pair of keys, those with the largest shares first."""
    from kernel_attention_lab.reporting import sweep_plots
    from kernel_attention_lab.reporting.figures import data_uri

    shares = record.importances or {}
    keys = sorted(record.space, key=lambda key: -shares.get(key, 0.0))[:KEYS]
    if len(keys) < 2 or not record.ranked():
        return None
    pictures = []
    for first, second in combinations(keys, 2):
        is_table = isinstance(record.space[first], list) and isinstance(record.space[second], list)
        kind = "means over all other keys" if is_table else "a dot for every point"
        alt = f"{record.metric_text} over {second} and {first}: {kind}."
        uri = data_uri(sweep_plots.against_two_keys(record, first, second))
        pictures.append(html.Picture(uri, alt, f"{first} and {second}: {kind}"))
    return html.Section("interactions", "Keys together", [html.Pictures(pictures, pair=len(pictures) > 1)])


def _all(record: SweepRecord) -> html.Section:
    table = _table(record, record.points)
    is_long = len(record.points) > 30
    pieces: list[html.Piece] = [html.Folded("The value of every point", [table]) if is_long else table]
    return html.Section("points", "All points", pieces)


def _failures(record: SweepRecord) -> html.Section | None:
    failed = [point for point in record.points if point.state == "failed"]
    if not failed:
        return None
    rows = [[str(point.number), point.error or "unknown"] for point in failed]
    return html.Section("failed", "Points that failed", [html.Table(("point", "reason"), rows)])


def _plan(record: SweepRecord) -> html.Section:
    rows = [[key, _entry_text(key, entry)] for key, entry in record.space.items()]
    facts = (
        ("recipe", record.recipe),
        ("sampler", record.sampler),
        ("seed of the sampler", str(record.sampler_seed)),
        ("seeds of a point", ", ".join(map(str, record.seeds))),
    )
    pieces = [html.Facts(facts), html.Table(("key", "values"), rows), html.Code(record.command, wrap=True)]
    return html.Section("space", "The space", pieces)


def _entry_text(key: str, entry: object) -> str:
    if isinstance(entry, list):
        return "; ".join(key_text(key, value) for value in entry)
    assert isinstance(entry, dict)
    text = f"from {format_value(entry['low'])} to {format_value(entry['high'])}"
    if entry.get("log"):
        text += ", uniform in the logarithm"
    return text if entry.get("step") is None else f"{text} in steps of {format_value(entry['step'])}"


def _table(record: SweepRecord, points: Sequence[SweepPoint]) -> html.Table:
    rows = [
        [
            str(point.number),
            *(key_text(key, point.keys[key]) if key in point.keys else "" for key in record.space),
            point_value(record, point),
        ]
        for point in points
    ]
    return html.Table(("point", *record.space, record.metric_text), rows, numbers=True)
