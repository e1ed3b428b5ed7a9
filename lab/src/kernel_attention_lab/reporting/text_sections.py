"""The sections of words and tables: result, seeds, perplexity, data, configuration."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    MISSING,
    attention_details,
    format_count,
    format_duration,
    format_metric,
    format_number,
    format_seeds,
    format_spread,
    format_value,
    metric_name,
    sentence,
)
from kernel_attention_lab.reporting.records import RunRecord, SeedRecord
from kernel_attention_lab.run_folder import is_number

# The figures of a seed, in addition to the headline figure.
FIGURES = (
    "accuracy", "swapped_accuracy", "mean_accuracy", "pixel_accuracy", "perplexity", "rmse", "r2", "loss",
)  # fmt: skip
FIGURE_NAMES = {"swapped_accuracy": "accuracy, words swapped"}
# The predictors of a text: the model, also with words of the text swapped, and counts.
MODEL = {
    "perplexity": "the model",
    "attacked_perplexity": "the model, words swapped",
    "attacked_inputs_perplexity": "the model, words swapped in its input only",
}
COUNTS = {
    "bigram_perplexity": "bigram counts",
    "unigram_perplexity": "unigram counts",
    "uniform_perplexity": "a uniform guess",
}
FACTS = {
    "dataset": "data set",
    "num_features": "channels",
    "max_len": "longest sequence",
    "parts": "texts in a case",
    "train_cases": "training cases",
    "validation_cases": "validation cases",
    "test_cases": "test cases",
    "image_sizes": "pixels of an image",
    "train_tokens": "training tokens",
    "validation_tokens": "validation tokens",
    "test_tokens": "test tokens",
}
VOCABULARIES = {"word": "words", "byte": "bytes", "bpe": "byte pairs"}
VERSIONS = {
    "kernel_attention": "kernel-attention",
    "python": "Python",
    "torch": "PyTorch",
    "lightning": "Lightning",
    "numpy": "NumPy",
    "platform": "system",
}


def opening(run: RunRecord) -> list[html.Piece]:
    """The test figure with its protocol, the problems of the run if any, and the main facts."""
    pieces: list[html.Piece] = [_result(run)]
    unfinished = [seed for seed in run.planned_seeds if seed not in {record.seed for record in run.evaluated}]
    if not run.summary:
        pieces.append(html.Notice(_unfinished_text(run, unfinished)))
    if run.problems:
        pieces.append(html.Notice("Some files of the run could not be used:", run.problems))
    warning = _worse_than_counts(run)
    if warning:
        pieces.append(html.Notice(warning))
    length, tokens, cases = run.planned_length, run.mean("tokens"), run.mean("cases")
    pairs = [
        ("Mechanism", attention_details(run.config.get("attention") or run.summary.get("attention"))),
        ("Protocol", run.protocol or MISSING),
        ("Seeds", ", ".join(str(seed) for seed in run.planned_seeds) or MISSING),
        ("Training", f"{length} {run.unit}s" if is_number(length) else MISSING),
        ("Sequences of a step", _step_text(run)),
        ("Test cases", format_count(run.data.get("test_cases") if cases is None else int(cases))),
        ("Predicted tokens", MISSING if tokens is None else format_count(int(tokens))),
        ("Training time", format_duration(run.summary.get("seconds"))),
    ]
    return [*pieces, html.Facts(tuple(pair for pair in pairs if pair[1] != MISSING))]


def _step_text(run: RunRecord) -> str:
    """How many sequences a step has, where several processes or passes read them, and the random numbers."""
    said = [str(run.summary[key]) for key in ("step_text", "seeds_text") if key in run.summary]
    return "; ".join(said) or MISSING


def _result(run: RunRecord) -> html.Result:
    metric = run.metric
    seeds: Sequence[Any] = [record.seed for record in run.evaluated]
    mean, std = run.mean(metric), None
    if run.summary:
        mean, std, seeds = run.summary.get("mean"), run.summary.get("std"), run.planned_seeds
    protocol = run.protocol or "unknown"
    context = " ".join(part for part in (run.protocol_text, _majority(run), _counts(run)) if part)
    if mean is None:
        said = f"The test split has not been evaluated (protocol {protocol})."
        return html.Result("no test figure", said, context)
    spread = "mean ± standard deviation over " if is_number(std) else ("mean of " if len(seeds) > 1 else "")
    partial = "" if run.summary else "; preliminary"
    said = f"Test {metric_name(metric)}, protocol {protocol}: {spread}{format_seeds(seeds)}{partial}."
    return html.Result(format_spread(metric, mean, std), said, context)


def _majority(run: RunRecord) -> str:
    """The score of a constant answer, to compare an accuracy with."""
    counts = run.confusion_counts
    if run.metric != "accuracy" or counts is None or not counts.sum():
        return ""
    share = format_metric("accuracy", float(counts.sum(axis=1).max() / counts.sum()))
    return f"Always answering the test split's most frequent class would score {share}."


def _counts(run: RunRecord) -> str:
    """The scores of counts in the training text, to compare a perplexity with."""
    known = [(COUNTS[key], run.mean(key)) for key in ("unigram_perplexity", "bigram_perplexity")]
    said = [f"{name} {format_number(value)}" for name, value in known if value is not None]
    return f"Without a network: {', '.join(said)}; lower is better." if said else ""


def _worse_than_counts(run: RunRecord) -> str:
    """A warning if the model predicts its test text no better than counts; otherwise empty."""
    found = run.mean("perplexity")
    known = {key: run.mean(key) for key in COUNTS}
    if found is None:
        return ""
    better = [key for key, value in known.items() if value is not None and value <= found]
    if not better:
        return ""
    listed = " and ".join(f"{COUNTS[key]} ({format_number(known[key])})" for key in better)
    return (
        f"The model predicts the test split no better than {listed}, which need no network: its perplexity "
        f"is {format_number(found)}."
    )


def _unfinished_text(run: RunRecord, unfinished: Sequence[int]) -> str:
    started = [record for record in run.seeds if record.seed in unfinished]
    of = f" of {run.planned_length}" if is_number(run.planned_length) else ""
    reached = [
        f"seed {record.seed} has completed "
        + (f"no {run.unit}" if record.reached is None else f"{run.unit} {record.reached}{of}")
        for record in started
    ]
    waiting = [seed for seed in unfinished if seed not in {record.seed for record in started}]
    if waiting:
        reached.append(f"{format_seeds(waiting)} {'has' if len(waiting) == 1 else 'have'} not started")
    state = "; ".join(reached) or "every seed was evaluated, but the summary is missing"
    return f"This run is not finished: {state}. Training with --resume continues it."


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


def perplexity_section(run: RunRecord) -> html.Section | None:
    """The perplexities of the model, clean and attacked, and of counts; None for other tasks."""
    splits = {"": "test", "validation_": "validation"}
    names = MODEL | COUNTS
    values = {key: [run.mean(f"{split}{key}") for split in splits] for key in names}
    values["uniform_perplexity"] = [run.mean("uniform_perplexity")] * len(splits)  # it depends on no text
    if run.mean("perplexity") is None:
        return None
    shown = {key: row for key, row in values.items() if row != [None, None]}
    rows = [[names[key], *map(format_number, row)] for key, row in shown.items()]
    head = ["what predicts the next token", *splits.values()]
    caption = "Perplexity by split; lower is better. The counts are those of the training text."
    if len(run.evaluated) > 1:
        caption += " Means over the seeds."
    return html.Section("perplexity", "Perplexity", [html.Table(head, rows, caption, numbers=True)])


def data_section(run: RunRecord) -> html.Section:
    """The sizes, classes and vocabulary of the data, in words; ``data.json`` has the lists."""
    title = "Data"
    if not run.data:
        return html.Section("data", title, [html.Paragraph("data.json is missing or could not be read.")])
    values = [
        [FACTS.get(key, key.replace("_", " ")), format_count(value)]
        for key, value in run.data.items()
        if key not in ("task", "vocabulary_size") and isinstance(value, str | int | float)
    ]
    if "vocabulary_size" in run.data:
        known = run.data.get("vocabulary")
        kind = str(known.get("kind")) if isinstance(known, Mapping) else "token"
        size = format_count(run.data["vocabulary_size"])
        values.append(["vocabulary", f"{size} {VOCABULARIES.get(kind, kind + 's')}"])
    names = run.class_names
    if names:
        values.append(["classes", format_count(len(names))])
    pieces: list[html.Piece] = [html.Table((), values)]
    if names:
        pieces.append(html.Folded("Names of the classes", [html.Paragraph(", ".join(names))]))
    return html.Section("data", title, pieces)


def configuration_section(run: RunRecord) -> html.Section:
    """The text of the resolved recipe."""
    missing = html.Paragraph("config.yaml is missing or could not be read.")
    return html.Section(
        "configuration", "Configuration", [html.Code(run.config_text) if run.config_text else missing]
    )


def reproduce_section(run: RunRecord) -> html.Section:
    """The command, the versions and the machine."""
    command = run.versions.get("command")
    if isinstance(command, list):
        command = shlex.join(str(word) for word in command)
    pieces: list[html.Piece] = [
        html.Code(str(command), wrap=True) if command else html.Paragraph("The command was not recorded.")
    ]
    rows = {key: value for key, value in run.versions.items() if key != "command"}
    if "machine" in run.summary:
        rows["machine"] = run.summary["machine"]
    said = [[VERSIONS.get(key, key.replace("_", " ")), format_value(value)] for key, value in rows.items()]
    if "seconds" in run.summary:
        said.append(["training time of all seeds", format_duration(run.summary["seconds"])])
    if said:
        pieces.append(html.Table((), said, "Versions, machine and duration"))
    kept = ["the metrics as CSV and JSON"]
    kept += ["the evaluation"] if run.evaluated else []
    kept += ["the spectra"] if any(record.spectra for record in run.seeds) else []
    kept += ["the diagnostics"] if any(record.diagnostics for record in run.seeds) else []
    text = f"In addition to this page, the run folder has {', '.join(kept)} and the weights of every seed"
    pieces.append(html.Paragraph(sentence(text), muted=True))
    return html.Section("reproduce", "Reproduce", pieces)
