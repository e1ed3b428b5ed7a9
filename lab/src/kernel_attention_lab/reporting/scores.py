"""Scores of the model: by seed, beside what needs no training, under corruptions, in episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    COUNTS,
    MISSING,
    format_duration,
    format_metric,
    format_number,
    format_spread,
    format_value,
    metric_name,
)
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.run_folder import is_number

# The figures of a seed, in addition to the headline figure.
FIGURES = (
    "accuracy", "swapped_accuracy", "mean_accuracy", "pixel_accuracy", "perplexity", "rmse", "r2", "loss",
)  # fmt: skip
FIGURE_NAMES = {"swapped_accuracy": "accuracy, words swapped"}
OF_MAPS = ("mean_iou", "mean_accuracy", "pixel_accuracy")
TEXT_PREDICTORS = {
    "perplexity": "the model",
    "attacked_perplexity": "the model, words swapped",
    "attacked_inputs_perplexity": "the model, words swapped in its input only",
    **COUNTS,
}
MAP_PREDICTORS = {
    "": "the model",
    "corrupted_": "the model, corrupted images",
    "majority_": "at every place the most frequent class there",
    "constant_": "the most frequent class everywhere",
}
POLICIES = {
    "": "the policy",
    "data_": "recorded episodes",
    "best_data_": "the best tenth of the recorded episodes",
    "random_": "random actions",
}


def seeds_section(run: RunRecord) -> html.Section:
    """One row per seed with the test figures, the selected epoch or step, and the time; then the mean."""
    if not run.seeds:
        return html.Section("seeds", "Seeds", [html.Paragraph("No seed has started.")])
    keys = dict.fromkeys((run.metric, *FIGURES))
    metrics = [key for key in keys if any(key in (record.evaluation or {}) for record in run.seeds)]
    head = ["seed", *(f"test {FIGURE_NAMES.get(key, metric_name(key))}" for key in metrics)]
    head += [f"selected {run.unit}", f"{run.unit}s trained", "training time", "state"]
    rows = [_seed_row(run, record, metrics) for record in run.seeds]
    several = len(run.evaluated) > 1
    if several:
        spreads = [_spread(run, key) for key in metrics]
        rows.append(["mean ± deviation", *spreads, *[""] * (len(head) - len(spreads) - 1)])
    table = html.Table(head, rows, f"Protocol {run.protocol or 'unknown'}.", numbers=True, total=several)
    return html.Section("seeds", "Seeds", [table])


def _seed_row(run: RunRecord, record: SeedRecord, metrics: Sequence[str]) -> list[str]:
    evaluation = record.evaluation or {}
    seconds = record.curve("seconds")
    state = "evaluated" if evaluation else f"stopped after {run.unit} {record.reached}"
    return [
        str(record.seed),
        *(format_metric(name, evaluation.get(name)) for name in metrics),
        format_value(record.selected),
        format_value(record.reached),
        format_duration(float(np.nansum(seconds[1])) if seconds else None),
        state if evaluation or record.metrics else f"no {run.unit} completed",
    ]


def _spread(run: RunRecord, metric: str) -> str:
    found = [(record.evaluation or {}).get(metric) for record in run.evaluated]
    values = [float(value) for value in found if is_number(value)]
    std = float(np.std(values, ddof=1)) if len(values) > 1 else None
    return format_spread(metric, run.mean(metric), std)


def baselines_section(run: RunRecord) -> html.Section | None:
    """The model beside what needs no training; None for a task that measures nothing of the kind."""
    rows: dict[str, tuple[str, ...]]
    if run.task == "language":
        rows = {words: (key, f"validation_{key}") for key, words in TEXT_PREDICTORS.items()}
        rows[COUNTS["uniform_perplexity"]] = ("uniform_perplexity",) * 2  # it depends on no text
        head = ["what predicts the next token", "test", "validation"]
        caption = "Perplexity by split; lower is better. The counts are those of the training text."
    elif run.task == "segmentation":
        rows = {words: tuple(f"{key}{name}" for name in OF_MAPS) for key, words in MAP_PREDICTORS.items()}
        head = ["what predicts", *map(metric_name, OF_MAPS)]
        caption = "The test split by what predicts it. The two last look at no image."
    elif run.task == "decisions":
        rows = {words: (f"{key}{run.metric}",) for key, words in POLICIES.items()}
        head = ["what acts", metric_name(run.metric)]
        caption = "Beside what needs no training. Means over the episodes."
    else:
        return None
    if run.mean(run.metric) is None:
        return None
    if len(run.evaluated) > 1:
        caption += " Means over the seeds."
    values = {words: [(key, run.mean(key)) for key in keys] for words, keys in rows.items()}
    cells = [
        [words, *(format_metric(key, value) for key, value in found)]
        for words, found in values.items()
        if any(value is not None for _, value in found)
    ]
    return html.Section("baselines", "Baselines", [html.Table(head, cells, caption, numbers=True)])


def episodes_section(run: RunRecord) -> html.Section | None:
    """A row for each seed and return that was asked for: the deviation is that over the episodes."""
    if run.task != "decisions" or not run.evaluated:
        return None
    metric, rows = run.metric, []
    names = list(dict.fromkeys((metric, "episode_return")))
    for record in run.evaluated:
        found = record.evaluation or {}
        for key in found:
            stem, _, asked = key.partition("_target_")
            if stem != metric:
                continue
            suffix = f"_target_{asked}" if asked else ""
            target = asked or format_number(found.get("target_return"))
            spreads = [
                format_spread(name, found.get(f"{name}{suffix}"), found.get(f"{name}_deviation{suffix}"))
                for name in names
            ]
            length = format_number(found.get(f"episode_length{suffix}"))
            rows.append([str(record.seed), target, *spreads, length])
    episodes = run.mean("episodes")
    count = MISSING if episodes is None else f"{episodes:.0f}"
    caption = (
        f"{count} episodes for each seed and each return that was asked for: mean ± standard deviation over "
        "the episodes. The headline is the mean of the first one, and its deviation that over the seeds."
    )
    head = ["seed", "asked for", *map(metric_name, names), "steps"]
    return html.Section("episodes", "Episodes", [html.Table(head, rows, caption, numbers=True)])


def corruptions_section(run: RunRecord) -> html.Section | None:
    """The mean IoU of a segmentation by corruption and severity; None where it was not measured."""
    entries = [
        entry
        for record in run.evaluated
        for entry in (record.evaluation or {}).get("corruptions") or []
        if isinstance(entry, Mapping) and is_number(entry.get("mean_iou"))
    ]
    if run.task != "segmentation" or not entries:
        return None
    found: dict[str, dict[Any, list[float]]] = {}
    for entry in entries:
        by_severity = found.setdefault(str(entry.get("corruption")), {})
        by_severity.setdefault(entry.get("severity"), []).append(entry["mean_iou"])
    severities = sorted({severity for each in found.values() for severity in each if is_number(severity)})
    rows = [
        [
            kind.replace("_", " "),
            *(
                format_metric("mean_iou", float(np.mean(each[at]))) if at in each else MISSING
                for at in severities
            ),
        ]
        for kind, each in found.items()
    ]
    cases = run.mean("corrupted_cases")
    of = "" if cases is None else f" of {int(cases)} test images"
    caption = f"Mean IoU{of} under the corruptions of ImageNet-C, by severity."
    head = ["corruption", *(f"severity {severity}" for severity in severities)]
    return html.Section("corruptions", "Corruptions", [html.Table(head, rows, caption, numbers=True)])
