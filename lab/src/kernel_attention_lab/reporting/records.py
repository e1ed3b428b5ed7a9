"""The data of a report from the folder of a finished or interrupted run.

A failed run needs a report most. So an absent file leaves a gap, and a file that cannot be read leaves a line
in ``problems``; only a folder without any run is an error. ``kernel_attention_lab.run_folder`` reads
the files.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.reporting.formats import sentence
from kernel_attention_lab.run_folder import RunFolder, is_number

Curve = tuple[np.ndarray, np.ndarray]
Content = TypeVar("Content")

METRICS = {
    "classification": "accuracy",
    "regression": "rmse",
    "language": "perplexity",
    "segmentation": "mean_iou",
    "sequence_labels": "accuracy",
    "decisions": "normalized_score",
}
"""The headline figure of a task, for a run that has no summary yet."""

_SELECTED_ON_TEST = {
    "paper": "test split",
    "thesis-1": "first 80 % of the test split",
    "thesis-3": "last 20 % of the test split",
}


@dataclass(frozen=True)
class SeedRecord:
    """The files of one seed of a run; a missing file is an empty field."""

    seed: int
    metrics: tuple[Mapping[str, Any], ...] = ()
    evaluation: Mapping[str, Any] | None = None
    spectra: Mapping[str, Any] | None = None
    diagnostics: Mapping[str, Any] | None = None
    over_training: Mapping[str, Any] | None = None
    examples: Mapping[str, np.ndarray] | None = None
    episode: Mapping[str, Any] | None = None
    film: bytes | None = None
    robustness: Mapping[str, Any] | None = None

    @property
    def unit(self) -> str:
        """The unit of the rows: ``step`` or ``epoch``."""
        return "step" if any("step" in row for row in self.metrics) else "epoch"

    def curve(self, key: str) -> Curve | None:
        """(epochs or steps, values) of a column of the metrics, (rows that have it,) each; None without rows.

        A null (a diverged value) is NaN.
        """
        unit = self.unit
        rows = [row for row in self.metrics if key in row and is_number(row.get(unit))]
        if not rows:
            return None
        values = [math.nan if row[key] is None else float(row[key]) for row in rows]
        return np.array([row[unit] for row in rows]), np.array(values)

    @property
    def reached(self) -> int | None:
        """The last completed epoch or step on disk."""
        found = [row[self.unit] for row in self.metrics if is_number(row.get(self.unit))]
        return int(max(found)) if found else None

    @property
    def selected(self) -> int | None:
        """The epoch or step whose weights were kept."""
        evaluation = self.evaluation or {}
        chosen = evaluation.get("best_step", evaluation.get("best_epoch"))
        return chosen if isinstance(chosen, int) else None

    def places(self, epochs: Sequence[int]) -> list[int]:
        """These epochs in the unit of the rows: themselves, or the steps of their rows; 0 is the start."""
        if self.unit == "epoch":
            return list(epochs)
        steps = {row.get("epoch"): int(row["step"]) for row in self.metrics if is_number(row.get("step"))}
        return [(steps | {0: 0}).get(epoch, epoch) for epoch in epochs]

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
        """The non-zero singular values of each head of a layer, descending; empty where none are recorded.

        They are float32, in which ``diagnose`` computes them, so that a reader knows what rounding left.
        Short sequences have fewer values than the record has room for; the rest is zero padding.
        """
        for entry in (self.spectra or {}).get("layers", []):
            if entry.get("layer") == layer:
                heads = (
                    np.array([v for v in head if is_number(v)], np.float32)
                    for head in entry["singular_values"]
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

    folder: RunFolder
    config_text: str
    config: Mapping[str, Any]
    versions: Mapping[str, Any]
    data: Mapping[str, Any]
    summary: Mapping[str, Any]
    seeds: tuple[SeedRecord, ...]
    problems: tuple[str, ...]

    def fact(self, key: str) -> Any:
        """A value of the summary, or of the configuration before there is a summary; else None."""
        return self.summary[key] if key in self.summary else self.config.get(key)

    @property
    def evaluated(self) -> list[SeedRecord]:
        """The seeds that were evaluated on the test split."""
        return [seed for seed in self.seeds if seed.evaluation]

    @property
    def unit(self) -> str:
        """The unit of training: ``step`` or ``epoch``."""
        return "step" if "steps" in self.config or any(s.unit == "step" for s in self.seeds) else "epoch"

    @property
    def planned_length(self) -> Any:
        """The number of epochs or steps in the recipe; None where it cannot be read."""
        return self.config.get(f"{self.unit}s")

    @property
    def task(self) -> str:
        """A key of ``METRICS``."""
        if "task" in self.data:
            return str(self.data["task"])
        return next((task for task, metric in METRICS.items() if metric == self.metric), "classification")

    @cached_property
    def metric(self) -> str:
        """The name of the headline metric: from the summary, or else from the evaluations and the curves."""
        if "metric" in self.summary:
            return str(self.summary["metric"])
        if self.data.get("task") in METRICS:
            return METRICS[self.data["task"]]
        found = {key for seed in self.evaluated for key in seed.evaluation or {}}
        found |= {key.removeprefix("val_") for seed in self.seeds for row in seed.metrics for key in row}
        return next((name for name in METRICS.values() if name in found), "accuracy")

    @property
    def protocol(self) -> str | None:
        """The name of the protocol that selected the epoch."""
        for source in (self.summary, *(seed.evaluation or {} for seed in self.seeds), self.config):
            if source.get("protocol"):
                return str(source["protocol"])
        return None

    @property
    def selection_split(self) -> str:
        """The name of the cases that select the epoch."""
        return _SELECTED_ON_TEST.get(self.protocol or "", "validation")

    @property
    def is_selected_on_test(self) -> bool:
        """Return whether the protocol reports the cases that selected the epoch."""
        return self.protocol in _SELECTED_ON_TEST

    @property
    def protocol_text(self) -> str:
        """The meaning of the protocol, in a sentence; empty before the summary is written."""
        return sentence(str(self.summary.get("protocol_text") or ""))

    @property
    def planned_seeds(self) -> list[int]:
        """All seeds of the run, including those that have not started."""
        planned = self.fact("seeds")
        return list(planned) if isinstance(planned, list) else [seed.seed for seed in self.seeds]

    @property
    def confusion_counts(self) -> np.ndarray | None:
        """The sum of the confusion matrices of all seeds, (classes, classes); None without any."""
        found = [matrix for seed in self.seeds if (matrix := seed.confusion_matrix) is not None]
        if not found or any(matrix.shape != found[0].shape for matrix in found):
            return None
        return np.stack(found).sum(axis=0)

    @property
    def class_names(self) -> list[str]:
        """The names of the classes in the order of the confusion matrix; empty for other tasks."""
        names = self.data.get("class_names")
        return [str(name) for name in names] if isinstance(names, list) else []

    def names_of(self, count: int) -> list[str]:
        """The names of so many classes; their numbers where the run does not name as many."""
        names = self.class_names
        return names[:count] if len(names) >= count else [str(number) for number in range(count)]

    def curves(self, key: str) -> dict[int, Curve]:
        """A column of the metrics by seed, of the seeds that have it."""
        found = {record.seed: record.curve(key) for record in self.seeds}
        return {seed: curve for seed, curve in found.items() if curve is not None}

    def mean(self, key: str) -> float | None:
        """The mean of a figure over the seeds that have it; None where no seed has it."""
        found = [(record.evaluation or {}).get(key) for record in self.evaluated]
        values = [float(value) for value in found if is_number(value)]
        return float(np.mean(values)) if values else None


def read_run(run_dir: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        InputError: ``run_dir`` is not a folder, or holds neither a configuration, a seed nor a summary.
    """
    folder = RunFolder(Path(run_dir))
    if not folder.path.is_dir():
        raise InputError(f"run folder {str(run_dir)!r} does not exist; give the folder that `train` wrote")
    problems: list[str] = []

    def readable(read: Callable[[], Content | None]) -> Content | None:
        try:
            return read()
        except InputError as error:
            problems.append(" ".join(str(error).replace(f"{folder.path}{os.sep}", "").split()))
            return None

    def seed_record(seed: int) -> SeedRecord:
        return SeedRecord(
            seed,
            tuple(readable(lambda: folder.metrics(seed)) or ()),
            readable(lambda: folder.evaluation(seed)) or None,
            readable(lambda: folder.spectra(seed)),
            readable(lambda: folder.diagnostics(seed)),
            readable(lambda: folder.diagnostics_over_training(seed)),
            readable(lambda: folder.examples(seed)),
            readable(lambda: folder.episode(seed)),
            readable(lambda: folder.film(seed)),
            readable(lambda: folder.robustness(seed)),
        )

    record = RunRecord(
        folder=folder,
        config_text=readable(folder.config_text) or "",
        config=readable(folder.config) or {},
        versions=readable(folder.versions) or {},
        data=readable(folder.data) or {},
        summary=readable(folder.summary) or {},
        seeds=tuple(map(seed_record, folder.seeds())),
        problems=(),
    )
    if not (record.config_text or record.seeds or record.summary or problems):
        raise InputError(
            f"folder {str(run_dir)!r} holds no run; a run has config.yaml, seed-K folders and summary.json"
        )
    return dataclasses.replace(record, problems=tuple(problems))
