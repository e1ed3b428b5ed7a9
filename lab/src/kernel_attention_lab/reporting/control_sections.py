"""The sections of a run on decisions: the episodes that were played, and pictures of one."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping

import numpy as np
from matplotlib.figure import Figure

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.figures import (
    MUTED,
    PALETTE,
    data_uri,
    legend_below,
    report_style,
)
from kernel_attention_lab.reporting.formats import (
    MISSING,
    format_number,
    format_seeds,
    format_spread,
    metric_name,
)
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.run_folder import is_number

_BASELINES = {
    "data": "recorded episodes",
    "best_data": "the best tenth of the recorded episodes",
    "random": "random actions",
}
_BINS = 24
_MOMENTS = 6


def control_sections(run: RunRecord) -> list[html.Section]:
    """The episodes of a run on decisions; nothing for other tasks."""
    if run.task != "decisions":
        return []
    pieces: list[html.Piece] = []
    if run.evaluated:
        pieces += [_scores(run), _baselines(run)]
    histogram = _histogram(run)
    pieces += [] if histogram is None else [html.Pictures([histogram])]
    sections = [html.Section("episodes", "Episodes", pieces)] if pieces else []
    shown = [piece for record in run.seeds for piece in _episode(run, record)]
    return sections + ([html.Section("agent", "An episode in pictures", shown)] if shown else [])


def _scores(run: RunRecord) -> html.Table:
    """A row for each seed and return that was asked for: the deviation is that over the episodes."""
    metric = run.metric
    rows = []
    for record in run.evaluated:
        found = record.evaluation or {}
        for key in found:
            stem, _, asked = key.partition("_target_")
            if stem != metric:
                continue
            suffix = f"_target_{asked}" if asked else ""
            target = asked or format_number(found.get("target_return"))
            spread = [
                format_spread(name, found.get(f"{name}{suffix}"), found.get(f"{name}_deviation{suffix}"))
                for name in dict.fromkeys((metric, "episode_return"))
            ]
            length = format_number(found.get(f"episode_length{suffix}"))
            rows.append([str(record.seed), target, *spread, length])
    names = [metric_name(name) for name in dict.fromkeys((metric, "episode_return"))]
    episodes = run.mean("episodes")
    count = MISSING if episodes is None else f"{episodes:.0f}"
    caption = (
        f"{count} episodes for each seed and each return that was asked for: mean ± standard deviation over "
        "the episodes. The headline is the mean of the first one, and its deviation that over the seeds."
    )
    return html.Table(["seed", "asked for", *names, "steps"], rows, caption, numbers=True)


def _baselines(run: RunRecord) -> html.Table:
    """The figure beside those that need no training."""
    values = [run.mean(run.metric), *(run.mean(f"{key}_{run.metric}") for key in _BASELINES)]
    names = ["the policy", *_BASELINES.values()]
    rows = [
        [name, format_number(value)] for name, value in zip(names, values, strict=True) if value is not None
    ]
    head = ["what acts", metric_name(run.metric)]
    return html.Table(head, rows, "Beside what needs no training. Means over the episodes.", numbers=True)


def _histogram(run: RunRecord) -> html.Picture | None:
    recorded: np.ndarray | None = None
    played: dict[str, list[float]] = {}
    for record in run.seeds:
        if record.episodes is None:
            continue
        recorded = np.asarray(record.episodes["recorded"], float)
        for name, found in record.episodes["played"].items():
            played.setdefault(name, []).extend(found["returns"])
    if recorded is None:
        return None
    groups = {_label(name): np.asarray(values, float) for name, values in played.items()}
    groups = {"recorded": recorded} | groups
    said = "; ".join(f"{name}: mean {format_number(float(values.mean()))}" for name, values in groups.items())
    seeds = format_seeds([record.seed for record in run.seeds if record.episodes is not None])
    return html.Picture(
        data_uri(return_histogram(groups)),
        f"Histograms of the returns of episodes. {said}.",
        f"Returns of the recorded episodes, and of those played by {seeds}, as shares of their number.",
        wide=True,
    )


def _label(name: str) -> str:
    return "random actions" if name == "random" else f"asked for {name}"


def _episode(run: RunRecord, record: SeedRecord) -> list[html.Piece]:
    """The film of a seed's episode, and a strip of it for readers on paper."""
    film, said = record.film, record.episode or {}
    if film is None:
        return []
    strip = frame_strip(film)
    score = said.get("normalized_score")
    known = f", normalised score {format_number(score)}" if is_number(score) else ""
    text = (
        f"{said.get('environment', 'The environment')}, seed {record.seed} of the model, seed "
        f"{said.get('episode_seed')} of the episode: return {format_number(said.get('episode_return'))}"
        f"{known} after {format_number(said.get('length'))} steps, asked for "
        f"{format_number(said.get('target'))}."
    )
    moving = html.Picture(
        f"data:image/gif;base64,{base64.b64encode(film).decode('ascii')}",
        f"The film of an episode. {text}",
        text,
    )
    pieces: list[html.Piece] = [html.Pictures([moving])]
    if strip is not None:
        caption = "Evenly spaced moments of it."
        pieces.append(html.Pictures([html.Picture(data_uri(strip), f"{caption} {text}", caption, wide=True)]))
    return pieces


@report_style()
def return_histogram(groups: Mapping[str, np.ndarray]) -> Figure:
    """Histograms over common bins, as shares of each group; the first group is filled, the others are lines.

    Args:
        groups: the returns of a group's episodes by its name.
    """
    values = np.concatenate(list(groups.values()))
    low, high = float(values.min()), float(values.max())
    edges = np.linspace(low, high if high > low else low + 1.0, _BINS + 1)
    figure = Figure(figsize=(7.4, 3.2))
    axis = figure.subplots()
    for place, (name, found) in enumerate(groups.items()):
        shares = np.histogram(found, edges)[0] / len(found)
        if place == 0:
            axis.stairs(shares, edges, fill=True, color=MUTED, alpha=0.3, label=name)
        else:
            axis.stairs(shares, edges, color=PALETTE[(place - 1) % len(PALETTE)], linewidth=1.8, label=name)
    axis.set(xlabel="return of an episode", ylabel="share of the episodes")
    legend_below(figure, axis)
    return figure


@report_style()
def frame_strip(film: bytes) -> Figure | None:
    """Evenly spaced frames of a GIF in a row; None where it cannot be read."""
    from PIL import Image, ImageSequence

    try:
        with Image.open(io.BytesIO(film), formats=["GIF"]) as opened:
            frames = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(opened)]
    except (OSError, ValueError, SyntaxError):
        return None
    chosen = np.linspace(0, len(frames) - 1, min(len(frames), _MOMENTS)).round().astype(int)
    figure = Figure(figsize=(1.7 * len(chosen), 1.75))
    for axis, place in zip(figure.subplots(1, len(chosen), squeeze=False)[0], chosen, strict=True):
        axis.imshow(frames[place])
        axis.grid(False)
        axis.set(xticks=[], yticks=[])
    return figure
