"""The parts of the report that are words and tables: result, seeds, data, configuration, reproduction."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

import numpy as np

from kernel_attention.experiments.reporting import html
from kernel_attention.experiments.reporting.formats import (
    MISSING,
    attention_details,
    format_duration,
    format_metric,
    format_number,
    format_seeds,
    format_spread,
    format_value,
    is_number,
    metric_name,
)
from kernel_attention.experiments.reporting.records import RunRecord, SeedRecord

CHANNEL_LIMIT = 40  # channels whose standardisation is listed


def opening(run: RunRecord) -> str:
    """The test figure with its protocol, what is wrong with the run if anything is, and the main facts."""
    parts = [_result(run)]
    unfinished = [seed for seed in run.planned_seeds if seed not in {record.seed for record in run.evaluated}]
    if not run.summary:
        parts.append(html.notice(_unfinished_text(run, unfinished)))
    if run.problems:
        parts.append(html.notice("Some files of the run could not be used:", run.problems))
    cases = run.data.get("test_cases")
    pairs = [
        ("Mechanism", attention_details(run.setting("attention") or run.summary.get("attention"))),
        ("Protocol", run.protocol or MISSING),
        ("Seeds", ", ".join(str(seed) for seed in run.planned_seeds) or MISSING),
        ("Test cases", format_value(cases)),
        ("Training time", format_duration(run.summary.get("seconds"))),
    ]
    parts.append(html.facts(pair for pair in pairs if pair[1] != MISSING))
    return "\n".join(parts)


def _result(run: RunRecord) -> str:
    metric = run.metric
    found = [(record.evaluation or {}).get(metric) for record in run.evaluated]
    values = [value for value in found if is_number(value)]
    seeds: Sequence[Any] = [record.seed for record in run.evaluated]
    mean, std = (float(np.mean(values)) if values else None), None
    if run.summary:
        mean, std, seeds = run.summary.get("mean"), run.summary.get("std"), run.planned_seeds
    protocol = run.protocol or "unknown"
    if mean is None:
        value = html.paragraph("no test figure", "value")
        said = f"The test split has not been evaluated (protocol {protocol})."
    else:
        value = html.paragraph(format_spread(metric, mean, std), "value")
        spread = (
            "mean ± standard deviation over " if is_number(std) else ("mean of " if len(seeds) > 1 else "")
        )
        partial = "" if run.summary else "; preliminary"
        said = f"Test {metric_name(metric)}, protocol {protocol}: {spread}{format_seeds(seeds)}{partial}."
    meaning = html.paragraph(said) + html.paragraph(
        " ".join((run.protocol_text, _majority(run))).strip(), "muted"
    )
    return f'<div class="result"><div>{value}</div><div class="meaning">{meaning}</div></div>'


def _majority(run: RunRecord) -> str:
    """What no learning at all would score: the context without which an accuracy says little."""
    counts = run.confusion_counts
    if run.metric != "accuracy" or counts is None or not counts.sum():
        return ""
    share = format_metric("accuracy", float(counts.sum(axis=1).max() / counts.sum()))
    return f"Always answering the test split's most frequent class would score {share}."


def _unfinished_text(run: RunRecord, unfinished: Sequence[int]) -> str:
    started = [record for record in run.seeds if record.seed in unfinished]
    epochs = run.setting("epochs") or run.setting("max_epochs")
    of = f" of {epochs}" if is_number(epochs) else ""
    reached = [
        f"seed {record.seed} has completed "
        + ("no epoch" if record.last_epoch is None else f"epoch {record.last_epoch}{of}")
        for record in started
    ]
    waiting = [seed for seed in unfinished if seed not in {record.seed for record in started}]
    if waiting:
        reached.append(f"{format_seeds(waiting)} {'has' if len(waiting) == 1 else 'have'} not started")
    state = "; ".join(reached) or "every seed was evaluated, but the summary is missing"
    return f"This run is not finished: {state}. Training with --resume continues it."


def seeds_section(run: RunRecord) -> html.Section:
    """One row a seed: the test figure, the epoch it came from, and the time."""
    metrics = [
        name
        for name in ("accuracy", "rmse", "r2", "loss")
        if any(name in (s.evaluation or {}) for s in run.seeds)
    ]
    head = ["seed", *(f"test {metric_name(name)}" for name in metrics)]
    head += ["selected epoch", "epochs trained", "test cases", "training time", "state"]
    if not run.seeds:
        return html.Section("seeds", "Seeds", html.paragraph("No seed has started."))
    rows = [_seed_row(record, metrics) for record in run.seeds]
    text = html.table(head, rows, f"Protocol {run.protocol or 'unknown'}.", numbers=True)
    return html.Section("seeds", "Seeds", text)


def _seed_row(record: SeedRecord, metrics: Sequence[str]) -> list[str]:
    evaluation = record.evaluation or {}
    seconds = record.curve("seconds")
    state = "evaluated" if evaluation else f"stopped after epoch {record.last_epoch}"
    return [
        str(record.seed),
        *(format_metric(name, evaluation.get(name)) for name in metrics),
        format_value(evaluation.get("best_epoch")),
        str(len(record.metrics)),
        format_value(evaluation.get("cases")),
        format_duration(float(np.nansum(seconds[1])) if seconds else None),
        state if evaluation or record.metrics else "no epoch completed",
    ]


def data_section(run: RunRecord) -> html.Section:
    """What went in: sizes, classes, and the standardisation fitted on the training split."""
    if not run.data:
        return html.Section("data", "Data", html.paragraph("data.json is missing or could not be read."))
    listed = ("class_names", "mean", "std")
    values = {
        key.replace("_", " "): format_value(value) for key, value in run.data.items() if key not in listed
    }
    if run.class_names:
        values["classes"] = str(len(run.class_names))
    body = html.key_values(values)
    if run.class_names:
        body += html.folded("Names of the classes", html.paragraph(", ".join(run.class_names)))
    mean, std = run.data.get("mean"), run.data.get("std")
    if isinstance(mean, list) and isinstance(std, list):
        rows = [
            [str(channel), format_number(m), format_number(s)]
            for channel, (m, s) in enumerate(zip(mean, std, strict=False))
        ]
        left_out = f" (the first {CHANNEL_LIMIT} of {len(rows)})" if len(rows) > CHANNEL_LIMIT else ""
        grid = html.table(["channel", "mean", "deviation"], rows[:CHANNEL_LIMIT], numbers=True)
        body += html.folded(f"Standardisation of the channels{left_out}", grid)
    return html.Section("data", "Data", body)


def configuration_section(run: RunRecord) -> html.Section:
    """The resolved recipe as written."""
    body = (
        html.code(run.config_text)
        if run.config_text
        else html.paragraph("config.yaml is missing or could not be read.")
    )
    return html.Section("configuration", "Configuration", body)


def reproduce_section(run: RunRecord) -> html.Section:
    """The command, the versions and the machine."""
    command = run.versions.get("command")
    if isinstance(command, list):
        command = shlex.join(str(word) for word in command)
    parts = [html.code(str(command)) if command else html.paragraph("The command was not recorded.")]
    rows = {
        key.replace("_", " "): format_value(value) for key, value in run.versions.items() if key != "command"
    }
    if "machine" in run.summary:
        machine = run.summary["machine"]
        nested = machine if isinstance(machine, dict) else {"machine": machine}
        rows |= {str(key).replace("_", " "): format_value(value) for key, value in nested.items()}
    if "seconds" in run.summary:
        rows["training time of all seeds"] = format_duration(run.summary["seconds"])
    if rows:
        parts.append(html.key_values(rows, "Versions, machine and duration"))
    parts.append(
        html.paragraph(
            "Beside this page the run folder keeps for every seed the metrics as CSV and JSON, the "
            "evaluation, the spectra, and the weights of the selected and of the last epoch.",
            "muted",
        )
    )
    return html.Section("reproduce", "Reproduce", "\n".join(parts))
