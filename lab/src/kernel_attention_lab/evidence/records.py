"""The record of a trained model: one small JSON file that tables are made from.

A record holds what produced the model (the recipe's keys, the seed, the software, the machine, the time it
took) and every figure measured on it, with the bits that paired tests need. It does not need the run folder.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kernel_attention.errors import InputError, writing
from kernel_attention.files import write_text_atomically
from kernel_attention_lab.families import FILE_NAME
from kernel_attention_lab.run_folder import RunFolder, read_json

SCHEMA = 1
FIGURES = ("evaluation", "robustness", "diagnostics", "course")  # what a record keeps of a seed

_LONGEST = 200  # file systems take names of 255 bytes, and the name of a temporary file is longer
_SOFTWARE = ("kernel_attention", "python", "torch", "lightning", "numpy", "platform")


@dataclass(frozen=True, kw_only=True)
class ResultRecord:
    """The record of one trained model.

    Args:
        label: the row of a table that the model belongs to; models of one label differ in their seed alone.
        seed: of the training.
        recipe: name of the recipe.
        config: the recipe's keys, without the seeds; of the run in ``start_from`` the folder's name alone.
            They are there to be read, and to compare rows of a table.
        budget: what the training took: its length, ``seconds`` and ``threads``.
        software: versions by package; ``platform``.
        machine: processor, cores and accelerator in one line.
        date: when the training began, as ISO 8601 in UTC.
        revision: git's name of the code that trained it; None where it is not known.
        figures: by file: those of ``evaluation`` (test split) and of ``robustness``, where there are any;
            the ``diagnostics`` that ``analyze`` measured, means over the layers that have them, and in
            ``by_layer`` a list of each, which earlier records lack; and the ``course`` of a training counted
            in steps: ``step``, ``training_seconds`` and every figure of training and validation, a list of
            each over the evaluations. Earlier records lack those of training, which are means over the
            batches since the evaluation before. Of a training counted in epochs the course has ``epoch`` and
            the figures that the suite names.
        schema: version of this list.
        keys: the names of those keys that a suite has set. Earlier records lack them.
    """

    label: str
    seed: int
    recipe: str
    config: dict[str, Any]
    budget: dict[str, Any]
    software: dict[str, str]
    machine: str
    date: str
    revision: str | None
    figures: dict[str, dict[str, Any]]
    schema: int = SCHEMA
    keys: list[str] = field(default_factory=list)

    @property
    def attention(self) -> Any:
        """The mechanism as the recipe has it."""
        return self.config["attention"]

    @property
    def single_figures(self) -> dict[str, Any]:
        """The figures of the diagnostics and the evaluation by name, and two of the course.

        These are the best ``val_accuracy``, and ``mean_train_accuracy`` over the whole of it.
        """
        found = self.figures.get("diagnostics", {}) | self.figures["evaluation"]
        course = self.figures.get("course", {})
        if accuracies := course.get("val_accuracy"):
            found["val_accuracy"] = max(accuracies)
        if accuracies := [each for each in course.get("train_accuracy", []) if each is not None]:
            found["mean_train_accuracy"] = statistics.fmean(accuracies)
        return found

    @property
    def by_layer(self) -> dict[str, list[float]]:
        """The figures of the diagnostics, a list over the layers that have them."""
        return dict(self.figures.get("diagnostics", {}).get("by_layer", {}))

    @property
    def file_name(self) -> str:
        """The name of the record's file."""
        return f"{self.label}-{self.seed}.json"


def make_records(
    run: str | Path,
    *,
    label: str | None = None,
    revision: str | None = None,
    keys: Sequence[str] = (),
    course: Sequence[str] = (),
) -> list[ResultRecord]:
    """The records of the finished seeds of a run folder.

    Args:
        run: a folder that ``train`` wrote; ``attack`` may have added to it.
        label: the row of a table that the run belongs to; by default the name of its mechanism.
        revision: git's name of the code that trained it, for a run that does not hold it.
        keys: the names of the recipe's keys that a suite has set.
        course: the figures whose course over the epochs is kept.

    Raises:
        InputError: for a folder that is no run, a run without a finished seed, a damaged file, a label that
            cannot be part of a file's name, or another revision than that in the run.
    """
    folder = RunFolder(Path(run))
    config = folder.config()
    if config is None:
        raise InputError(f"run {run}: not a run folder (it has no config.yaml)")
    label = label or (folder.summary() or {}).get("attention")
    if label is None:
        raise InputError(f"run {run}: has no summary.json yet, so give --label")
    if FILE_NAME.fullmatch(label) is None:
        raise InputError(f"label {label!r} must be letters, digits and . _ + -, as it names files")
    size = len(label.encode())
    if size > _LONGEST:
        raise InputError(
            f"label {label[:20]!r}... has {len(label.encode())} bytes; accepted: up to {_LONGEST}"
        )
    records = [
        dataclasses.replace(_record(folder, config, seed, label, revision, course), keys=list(keys))
        for seed in folder.seeds()
        if folder.evaluation(seed) is not None
    ]
    if not records:
        raise InputError(f"run {run}: no finished seed in it yet")
    return records


def write_records(
    records: Sequence[ResultRecord], folder: str | Path, *, replace: bool = False
) -> list[Path]:
    """Write records, a file each, unless one of them is there with other content.

    Args:
        records: the records.
        folder: created if missing.
        replace: write over other content.

    Returns:
        The files that were written; those with the same content are left as they are.

    Raises:
        InputError: where a file is there with other content, before any is written; and where the folder
            cannot be written.
    """
    folder = Path(folder)
    waiting = {folder / record.file_name: dataclasses.asdict(record) for record in records}
    for path, content in list(waiting.items()):
        with writing(f"record {path}"):
            exists = path.exists()
        is_there = exists and _content(path) == content
        if exists and not is_there and not replace:
            raise InputError(
                f"record {path} is there with other content; delete it first, or choose another --label"
            )
        if is_there:
            del waiting[path]
    for path, content in waiting.items():
        with writing(f"record {path}"):
            folder.mkdir(parents=True, exist_ok=True)
            write_text_atomically(path, json.dumps(content, indent=1, allow_nan=False) + "\n")
    return list(waiting)


def read_records(folder: str | Path) -> list[ResultRecord]:
    """All records of a folder, by label and seed.

    Raises:
        InputError: for a file that is no record, or is not named as its label and seed say.
    """
    records = map(read_record, Path(folder).glob("*.json"))
    return sorted(records, key=lambda record: (record.label, record.seed))


def read_record(path: Path) -> ResultRecord:
    """The record in a file; InputError for another content, or a name that is not its label and seed."""
    content = _content(path)
    if not _is_record(content):
        raise InputError(f"{path}: not a record of schema {SCHEMA}")
    record = ResultRecord(**content)
    if path.name != record.file_name:
        raise InputError(f"{path}: holds {record.label}, seed {record.seed} (expected {record.file_name})")
    return record


def _content(path: Path) -> Any:
    """The content of a record's file; one that lacks the suite's keys has none of them."""
    content = read_json(path)
    return {"keys": [], **content} if isinstance(content, dict) else content


def _record(
    folder: RunFolder,
    config: dict[str, Any],
    seed: int,
    label: str,
    revision: str | None,
    course: Sequence[str],
) -> ResultRecord:
    versions = folder.versions() or {}
    known = versions.get("revision")
    if known and revision and not known.startswith(revision):
        raise InputError(f"revision {revision} is not that of the run, {known}")
    summary = folder.summary() or {}
    figures = {name: read for name in FIGURES if (read := _figures(folder, seed, name, course)) is not None}
    length = {key: config[key] for key in ("epochs", "steps") if key in config}
    return ResultRecord(
        label=label,
        seed=seed,
        recipe=str(versions.get("recipe") or summary.get("recipe") or "unknown"),
        config=_portable(config),
        budget=length | {"seconds": figures["evaluation"].get("seconds"), "threads": config.get("threads")},
        software={key: versions[key] for key in _SOFTWARE if key in versions},
        machine=str(versions.get("machine") or summary.get("machine") or "unknown"),
        date=str(versions.get("date") or _written(folder.config_path)),
        revision=known or revision,
        figures=figures,
    )


def _portable(config: dict[str, Any]) -> dict[str, Any]:
    """A recipe's keys as they hold on any machine: where a run's folder lies does not."""
    kept = {key: value for key, value in config.items() if key != "seeds"}
    if kept.get("start_from"):
        kept["start_from"] = Path(kept["start_from"]).name
    return kept


def _is_record(content: Any) -> bool:
    names = {entry.name for entry in dataclasses.fields(ResultRecord)}
    if not isinstance(content, dict) or set(content) != names or content["schema"] != SCHEMA:
        return False
    kinds = {"label": str, "seed": int, "config": dict, "budget": dict, "figures": dict, "keys": list}
    is_typed = all(isinstance(content[name], kind) for name, kind in kinds.items())
    return is_typed and "attention" in content["config"] and "evaluation" in content["figures"]


def _figures(folder: RunFolder, seed: int, name: str, course: Sequence[str]) -> dict[str, Any] | None:
    """The figures of one file; of the evaluation the single ones, without the confusion matrix."""
    if name == "evaluation":
        found = folder.evaluation(seed) or {}
        return {key: value for key, value in found.items() if not isinstance(value, list | dict)}
    if name == "robustness":
        return folder.robustness(seed)
    if name == "diagnostics":
        return _diagnostics(folder.diagnostics(seed))
    return _course(folder.metrics(seed) or [], course)


def _diagnostics(found: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The mean over the layers of every figure of their summaries, each layer's, and what they are of."""
    if found is None:
        return None
    summaries = [layer["summary"] for layer in found["layers"]]
    names = sorted({name for summary in summaries for name in summary})
    values = {name: [summary[name] for summary in summaries if name in summary] for name in names}
    means = {name: statistics.fmean(each) for name, each in values.items()}
    return {"note": found["note"], "quantities": found.get("quantities", []), **means, "by_layer": values}


def _course(rows: Sequence[Mapping[str, Any]], wanted: Sequence[str]) -> dict[str, list[Any]] | None:
    """Figures of training and validation over the training time; the wanted ones where it counts epochs."""
    if rows and "training_seconds" in rows[0]:
        figures = [name for name in rows[0] if name.startswith(("train_", "val_"))]
        names = ["step", "training_seconds", *figures]
    elif rows and wanted:
        names = ["epoch", *wanted]
    else:
        return None
    return {name: [row.get(name) for row in rows] for name in names}


def _written(path: Path) -> str:
    return datetime.fromtimestamp(path.stat().st_mtime, UTC).isoformat(timespec="seconds")


def require_same_config(records: Sequence[ResultRecord], *, apart_from: Sequence[str] = ()) -> None:
    """InputError where two records differ in a key of their recipes: their rows would not be comparable.

    Keys that only one of them has are no difference: later versions add keys whose defaults change nothing.

    Args:
        records: of one table, or of one row.
        apart_from: keys that may differ.
    """
    for record in records[1:]:
        first = records[0]
        for key in sorted(first.config.keys() & record.config.keys() - set(apart_from)):
            if first.config[key] != record.config[key]:
                raise InputError(
                    f"records {first.file_name} and {record.file_name} differ in {key}: "
                    f"{first.config[key]!r} and {record.config[key]!r}"
                )
