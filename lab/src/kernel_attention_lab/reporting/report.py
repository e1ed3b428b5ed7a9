"""``write_report`` makes one self-contained page from a run folder."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kernel_attention.errors import writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.formats import (
    COUNTS,
    MISSING,
    attention_details,
    attention_title,
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
from kernel_attention_lab.reporting.records import RunRecord, read_run
from kernel_attention_lab.run_folder import is_number

REPORT_NAME = "report.html"
TASKS = {
    "language": "language model",
    "segmentation": "semantic segmentation",
    "sequence_labels": "classes of positions",
    "decisions": "decisions in an environment",
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


def write_report(run_dir: Path) -> Path:
    """Write ``report.html`` into a run folder and return its path.

    The page needs no other file and no network. It is written to a temporary file and moved into place, so an
    older report survives a failure. The page says what is missing (after an interruption, or for a mechanism
    without objective or spectra) and names unreadable files.

    Raises:
        InputError: ``run_dir`` is not a run folder, or cannot be written to.
    """
    run = read_run(Path(run_dir))
    text = render(run)
    target = run.folder.path / REPORT_NAME
    with writing(f"report {str(target)!r}"):
        write_text_atomically(target, text)
    return target


def render(run: RunRecord) -> str:
    """The page of a run as text."""
    # Imported here, because matplotlib takes half a second and some commands draw nothing.
    from kernel_attention_lab.reporting.calibration import uncertainty_section
    from kernel_attention_lab.reporting.confusion import classes_section
    from kernel_attention_lab.reporting.curves import curves_section, objective_section
    from kernel_attention_lab.reporting.diagnostics import diagnostics_section
    from kernel_attention_lab.reporting.examples import examples_section, film_section
    from kernel_attention_lab.reporting.scores import (
        baselines_section,
        corruptions_section,
        episodes_section,
        seeds_section,
    )
    from kernel_attention_lab.reporting.spectra import spectrum_section

    parts = (
        seeds_section, baselines_section, curves_section, objective_section, examples_section,
        episodes_section, film_section, classes_section, corruptions_section, uncertainty_section,
        spectrum_section, diagnostics_section, data_section, configuration_section, reproduce_section,
    )  # fmt: skip
    recipe = run.summary.get("recipe") or run.versions.get("recipe")
    origin = f"Recipe {format_value(recipe)}" if recipe else f"Run folder {run.folder.path.resolve().name}"
    dataset = str(run.data.get("dataset") or run.fact("dataset") or "unknown data set")
    mechanism = run.config.get("attention") or run.summary.get("attention")
    named = "Behaviour cloning" if mechanism == "none" else f"{attention_title(mechanism)} attention"
    return html.page(
        title=f"{named} on {dataset}",
        lead=f"{origin} · {TASKS.get(run.task, run.task)}",
        opening=opening(run),
        sections=[section for part in parts if (section := part(run)) is not None],
        footer="Written by kernel-attention from the files of the run folder. This page needs no network.",
    )


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
