"""The sections of a run on decisions: the episodes that were played, and pictures of one."""

from __future__ import annotations

import base64

import numpy as np

from kernel_attention.experiments.reporting import html
from kernel_attention.experiments.reporting.control_plots import frame_strip, return_histogram
from kernel_attention.experiments.reporting.figures import data_uri
from kernel_attention.experiments.reporting.formats import (
    MISSING,
    format_number,
    format_seeds,
    format_spread,
    metric_name,
)
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord
from kernel_attention.experiments.run_folder import is_number

_BASELINES = {
    "data": "recorded episodes",
    "best_data": "the best tenth of the recorded episodes",
    "random": "random actions",
}


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
