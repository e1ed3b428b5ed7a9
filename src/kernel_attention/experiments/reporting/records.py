"""Reading a run folder, whole or interrupted.

A report is most wanted when a run went wrong, so a file that is absent leaves a gap and one that cannot be
read leaves a line in ``problems``; only a folder that holds no run at all is an error.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention.experiments.reporting.formats import is_number, sentence

Curve = tuple[np.ndarray, np.ndarray]

PROTOCOL_TEXTS = {
    "holdout": "The epoch is selected on a held-out part of the training split; the test split is used once.",
    "paper": "The epoch is selected on the test split itself, as in the papers' released code, "
    "which makes the figure optimistic.",
}


@dataclass(frozen=True)
class SeedRecord:
    """What one seed of a run left behind; what is missing is empty."""

    seed: int
    metrics: tuple[Mapping[str, Any], ...] = ()
    evaluation: Mapping[str, Any] | None = None
    spectra: Mapping[str, Any] | None = None
    diagnostics: Mapping[str, Any] | None = None

    def curve(self, key: str) -> Curve | None:
        """(epochs, values) of a column of the metrics, each of shape (rows that have it,); None without rows.

        A null (a diverged value) is NaN.
        """
        rows = [row for row in self.metrics if key in row and is_number(row.get("epoch"))]
        if not rows:
            return None
        values = [math.nan if row[key] is None else float(row[key]) for row in rows]
        return np.array([row["epoch"] for row in rows]), np.array(values)

    @property
    def last_epoch(self) -> int | None:
        """The last epoch that was completed."""
        epochs = [row["epoch"] for row in self.metrics if is_number(row.get("epoch"))]
        return int(max(epochs)) if epochs else None

    @property
    def confusion_matrix(self) -> np.ndarray | None:
        """Test cases by true and predicted class, (classes, classes) int64; None without a square matrix."""
        matrix = (self.evaluation or {}).get("confusion_matrix")
        if not isinstance(matrix, list) or not matrix:
            return None
        square = all(isinstance(row, list) and len(row) == len(matrix) for row in matrix)
        if not square or not all(is_number(count) for row in matrix for count in row):
            return None
        return np.array(matrix, dtype=np.int64)

    def spectrum(self, layer: int) -> list[np.ndarray]:
        """The non-zero singular values of each head of a layer, descending; empty where none were kept.

        Short sequences have fewer values than were asked for; the rest is zero padding.
        """
        for entry in (self.spectra or {}).get("layers", []):
            if entry.get("layer") == layer:
                heads = (
                    np.array([v for v in head if is_number(v)], float) for head in entry["singular_values"]
                )
                return [head for head in (np.trim_zeros(head, "b") for head in heads) if head.size]
        return []

    @property
    def spectrum_layers(self) -> list[int]:
        """The layers that have a spectrum."""
        return [int(entry["layer"]) for entry in (self.spectra or {}).get("layers", [])]


@dataclass(frozen=True)
class RunRecord:
    """A run folder in memory."""

    path: Path
    config_text: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    data: Mapping[str, Any]
    summary: Mapping[str, Any]
    seeds: tuple[SeedRecord, ...]
    problems: tuple[str, ...]

    def setting(self, key: str) -> Any:
        """A value of the resolved configuration, wherever it is nested (the outermost wins); None without."""
        level: list[Any] = [self.config]
        while level:
            for node in level:
                if isinstance(node, Mapping) and key in node:
                    return node[key]
            level = [child for node in level if isinstance(node, Mapping) for child in node.values()]
        return None

    def fact(self, key: str) -> Any:
        """A value of the summary, or of the configuration of a run that has none yet."""
        return self.summary[key] if key in self.summary else self.setting(key)

    @property
    def evaluated(self) -> list[SeedRecord]:
        """The seeds that got to the test split."""
        return [seed for seed in self.seeds if seed.evaluation]

    @property
    def task(self) -> str:
        """``classification`` or ``regression``."""
        if "task" in self.data:
            return str(self.data["task"])
        return "classification" if self.metric == "accuracy" else "regression"

    @cached_property
    def metric(self) -> str:
        """The name of the headline metric: the summary's, or what the evaluations hold."""
        if "metric" in self.summary:
            return str(self.summary["metric"])
        found = {key for seed in self.evaluated for key in seed.evaluation or {}}
        found |= {key.removeprefix("val_") for seed in self.seeds for row in seed.metrics for key in row}
        fallback = "rmse" if self.data.get("task") == "regression" else "accuracy"
        return next((name for name in ("accuracy", "rmse", "r2") if name in found), fallback)

    @property
    def protocol(self) -> str | None:
        """How the epoch was selected, by name."""
        for source in (self.summary, *(seed.evaluation or {} for seed in self.seeds)):
            if source.get("protocol"):
                return str(source["protocol"])
        chosen = self.setting("protocol")
        return str(chosen) if chosen else None

    @property
    def protocol_text(self) -> str:
        """What the protocol means, in a sentence; empty for a protocol nobody explained."""
        return sentence(str(self.summary.get("protocol_text") or PROTOCOL_TEXTS.get(self.protocol or "", "")))

    @property
    def planned_seeds(self) -> list[int]:
        """All seeds of the run, also those that have not started."""
        planned = self.fact("seeds")
        return list(planned) if isinstance(planned, list) else [seed.seed for seed in self.seeds]

    @property
    def confusion_counts(self) -> np.ndarray | None:
        """The confusion matrices of all seeds added up, (classes, classes); None where there is none."""
        found = [matrix for seed in self.seeds if (matrix := seed.confusion_matrix) is not None]
        if not found or any(matrix.shape != found[0].shape for matrix in found):
            return None
        return np.stack(found).sum(axis=0)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the order of the confusion matrix; empty for regression."""
        return [str(name) for name in self.data.get("class_names") or []]


def read_run(run_dir: Path) -> RunRecord:
    """Reads a run folder.

    Raises:
        InputError: ``run_dir`` is not a folder, or holds neither a configuration, a seed nor a summary.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise InputError(f"run folder {str(run_dir)!r} does not exist; give the folder that `train` wrote")
    problems: list[str] = []
    config_text, config = _read_config(run_dir / "config.yaml", problems)
    found = {
        name: _read_object(run_dir / f"{name}.json", run_dir, problems)
        for name in ("versions", "data", "summary")
    }
    seeds = tuple(
        SeedRecord(
            seed=number,
            metrics=tuple(_read(folder / "metrics.json", run_dir, problems, _check_rows) or ()),
            evaluation=_read_object(folder / "evaluation.json", run_dir, problems) or None,
            spectra=_read(folder / "spectra.json", run_dir, problems, _check_spectra),
            diagnostics=_read(folder / "diagnostics.json", run_dir, problems, _check_diagnostics),
        )
        for number, folder in _seed_folders(run_dir)
    )
    if not (config_text or seeds or found["summary"] or problems):
        raise InputError(
            f"folder {str(run_dir)!r} holds no run; a run has config.yaml, seed-K folders and summary.json"
        )
    return RunRecord(
        path=run_dir, config_text=config_text, config=config, seeds=seeds, problems=tuple(problems), **found
    )


def _seed_folders(run_dir: Path) -> list[tuple[int, Path]]:
    matches = (
        (re.fullmatch(r"seed-(\d+)", child.name), child) for child in run_dir.iterdir() if child.is_dir()
    )
    return sorted((int(match[1]), child) for match, child in matches if match)


def _read_config(path: Path, problems: list[str]) -> tuple[str, Mapping[str, Any]]:
    import yaml  # comes with the training extra, which wrote the file

    if not path.is_file():
        return "", {}
    try:
        text = path.read_text(encoding="utf-8")
        config = yaml.safe_load(text)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        problems.append(f"{path.name} could not be read: {_one_line(error)}")
        return "", {}
    return text, config if isinstance(config, Mapping) else {}


def _read(path: Path, run_dir: Path, problems: list[str], check: Callable[[Any], None]) -> Any:
    """The checked content of a JSON file; None where it is absent, or unusable, which ``problems`` tells."""
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        check(content)
    except (OSError, ValueError, KeyError, TypeError) as error:
        problems.append(f"{path.relative_to(run_dir)} could not be read: {_one_line(error)}")
        return None
    return content


def _read_object(path: Path, run_dir: Path, problems: list[str]) -> Mapping[str, Any]:
    content = _read(path, run_dir, problems, _check_object)
    return content if content is not None else {}


def _check_object(content: Any) -> None:
    if not isinstance(content, dict):
        raise ValueError(f"expected an object, found {type(content).__name__}")


def _check_rows(content: Any) -> None:
    if not isinstance(content, list) or not all(isinstance(row, dict) for row in content):
        raise ValueError("expected a list of objects, one an epoch")
    for row in content:
        for key, value in row.items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{key} of epoch {row.get('epoch')} is {value!r}, not a number")


def _check_spectra(content: Any) -> None:
    _check_object(content)
    for entry in content["layers"]:
        int(entry["layer"])
        if not all(isinstance(head, list) for head in entry["singular_values"]):
            raise ValueError("singular_values must be one list a head")


def _check_diagnostics(content: Any) -> None:
    _check_object(content)
    for entry in content["layers"]:
        str(entry["name"]), str(entry["mechanism"])
        curves = [entry.get("explained_variance", []), *entry.get("mode_explained_variance", [])]
        numbers = [*entry["summary"].values(), *(value for curve in curves for value in curve)]
        numbers += [value for values in entry["by_head"].values() for value in values if value is not None]
        if not isinstance(entry["notes"], list) or not all(is_number(value) for value in numbers):
            raise ValueError(f"the figures of layer {entry['name']} are not numbers")


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
