"""The rows of a table of uncertainty, from the records of image runs: a row is a mechanism with a method."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kernel_attention_lab.evidence.comparison import Detection, Measurement, PairedFigure, compare_rows
from kernel_attention_lab.evidence.expressions import Observation
from kernel_attention_lab.evidence.findings import SIGNIFICANT
from kernel_attention_lab.evidence.records import ResultRecord
from kernel_attention_lab.packing import unpack_levels
from kernel_attention_lab.robustness.calibration import BINS
from kernel_attention_lab.robustness.uncertainty import answers_of

LARGER_IS_BETTER = {"known_ece": False, "known_nll": False, "corrupted_nll": False, "unseen_auroc": True}
"""The columns with a paired test."""

_FEWEST = 10  # cases of a bin that is drawn

Rows = dict[str, dict[str, dict[int, Measurement]]]
"""By row, column and seed. A row is ``label.method``, a column ``set_figure``."""


@dataclass(frozen=True, eq=False)
class CaseMean(PairedFigure):
    """The mean of a figure over the cases, (n,)."""

    of_case: np.ndarray

    def values(self) -> list[np.ndarray]:
        """The figure of each case, and a one that counts it."""
        return [np.stack([self.of_case, np.ones_like(self.of_case)], axis=1).astype(np.float32)]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The difference of the means."""
        (ours,), (theirs,) = sums, baseline
        found: np.ndarray = ours[:, 0] / ours[:, 1] - theirs[:, 0] / theirs[:, 1]
        return found


@dataclass(frozen=True, eq=False)
class CalibrationError(PairedFigure):
    """The expected calibration error over bins of equal width in confidence.

    is_right: (n,) bool.
    confidence: (n,), 0 to 1.
    """

    is_right: np.ndarray
    confidence: np.ndarray

    def values(self) -> list[np.ndarray]:
        """Right minus confidence at the bin of each case, and a one that counts it."""
        place = np.minimum((self.confidence * BINS).astype(np.int64), BINS - 1)
        found = np.zeros((len(place), BINS + 1), np.float32)
        found[np.arange(len(place)), place] = self.is_right - self.confidence
        found[:, -1] = 1
        return [found]

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The difference of the errors."""
        errors = [np.abs(each[:, :-1]).sum(axis=1) / each[:, -1] for (each,) in (sums, baseline)]
        found: np.ndarray = errors[0] - errors[1]
        return found


class Separation(Detection):
    """The AUROC of a detector, from the same levels."""

    @staticmethod
    def difference(sums: list[np.ndarray], baseline: list[np.ndarray]) -> np.ndarray:
        """The difference of the areas; images at one level count half."""
        return _area(sums) - _area(baseline)


def _area(counts: list[np.ndarray]) -> np.ndarray:
    known, unseen = (each.astype(np.float64) for each in counts)
    below = np.cumsum(known, axis=1) - known / 2
    found: np.ndarray = (unseen * below).sum(axis=1) / (unseen.sum(axis=1) * known.sum(axis=1))
    return found


def uncertainty_rows(records: Sequence[ResultRecord]) -> Rows:
    """Every figure of every method, with what its paired test needs.

    An ensemble stands under every seed that its label has, so that it can be compared with other rows.
    """
    rows: Rows = {}
    seeds: dict[str, list[int]] = {}
    for record in records:
        seeds.setdefault(record.label, []).append(record.seed)
    for record in records:
        for part, each in _parts(record):
            places = seeds[record.label] if part == "ensemble" else [record.seed]
            for method, figures in each["methods"].items():
                row = rows.setdefault(f"{record.label}.{method}", {})
                for name, measured in _measured(figures, each["cases"]).items():
                    row.setdefault(name, {}).update(dict.fromkeys(places, measured))
    return rows


def _parts(record: ResultRecord) -> Iterator[tuple[str, Mapping[str, Any]]]:
    robustness = record.figures.get("robustness", {})
    return ((name, robustness[name]) for name in ("uncertainty", "ensemble") if name in robustness)


def _measured(figures: Mapping[str, Any], cases: Mapping[str, int]) -> dict[str, Measurement]:
    paired: dict[str, PairedFigure] = {}
    known = answers_of(figures["known"], cases["known"])
    paired["known_ece"] = CalibrationError(known.is_right, known.confidence)
    paired["known_nll"] = CaseMean(known.nll)
    if "corrupted" in figures:
        paired["corrupted_nll"] = CaseMean(np.array(figures["corrupted"]["nll_by_image"]))
    if "unseen" in figures:
        levels = figures["unseen"]["levels"]
        sizes = {"in": cases["known"], "out": cases["unseen"]}
        paired["unseen_auroc"] = Separation(*(unpack_levels(levels[name], sizes[name]) for name in sizes))
    found = {}
    for kind in ("known", "corrupted", "unseen"):
        for name, value in figures.get(kind, {}).items():
            if isinstance(value, float):
                column = f"{kind}_{name}"
                found[column] = Measurement(value, paired=paired.get(column))
    return found


def uncertainty_columns(records: Sequence[ResultRecord]) -> Iterator[Observation]:
    """An observation for every figure; one of the ensemble, not one for each seed."""
    for row, columns in uncertainty_rows(records).items():
        for column, cells in columns.items():
            chosen = list(cells.items())[:1] if row.endswith(".ensemble") else cells.items()
            for seed, measured in chosen:
                yield {"row": row, "column": column, "seed": seed, "value": measured.value}


def uncertainty_differences(
    records: Sequence[ResultRecord], baselines: Mapping[str, str | Sequence[str]]
) -> Iterator[Observation]:
    """The differences in the columns with a paired test, p adjusted over all of them.

    ``is_better`` is None where no difference is found.
    """
    tested = {
        row: {column: cells for column, cells in columns.items() if column in LARGER_IS_BETTER}
        for row, columns in uncertainty_rows(records).items()
    }
    for each in compare_rows(tested, baselines):
        interval = each.interval
        is_better = (interval.difference > 0) == LARGER_IS_BETTER[each.column]
        yield {
            "row": each.row, "baseline": each.baseline, "column": each.column, "seeds": list(each.seeds),
            "difference": interval.difference, "low": interval.low, "high": interval.high,
            "p_value": each.p_value, "adjusted": each.adjusted,
            "is_better": is_better if each.adjusted <= SIGNIFICANT else None,
        }  # fmt: skip


def uncertainty_curves(records: Sequence[ResultRecord]) -> Iterator[Observation]:
    """The ``points`` of reliability diagrams and risk-coverage curves; a diagonal where there are some.

    Bins with fewer than ten cases are left out.
    """
    for record in records:
        for _, each in _parts(record):
            for method, figures in each["methods"].items():
                diagram, risk = figures["known"]["reliability"], figures["known"]["risk"]
                here = {"row": f"{record.label}.{method}", "seed": record.seed}
                bins = zip(*(diagram[name] for name in ("confidence", "accuracy", "cases")), strict=True)
                points = [[x, y] for x, y, cases in bins if cases >= _FEWEST]
                yield here | {"curve": "reliability", "points": points}
                points = [[at / len(risk), y] for at, y in enumerate(risk, start=1)]
                yield here | {"curve": "risk against coverage", "points": points}
    if any(True for record in records for _ in _parts(record)):
        yield {"row": "calibrated", "seed": 0, "curve": "reliability", "points": [[0, 0], [1, 1]]}


def training_costs(records: Sequence[ResultRecord]) -> dict[str, float]:
    """Mean seconds of a training by label; under ``ensemble`` the sum over the members."""
    by_label: dict[str, list[float]] = {}
    costs = {}
    for record in records:
        if (seconds := record.budget.get("seconds")) is not None:
            by_label.setdefault(record.label, []).append(float(seconds))
    for label, seconds in by_label.items():
        costs[label] = statistics.fmean(seconds)
    for record in records:
        if "ensemble" in record.figures.get("robustness", {}):
            costs["ensemble"] = sum(by_label[record.label])
    return costs
