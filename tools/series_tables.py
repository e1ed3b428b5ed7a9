"""The tables of docs/time-series.md, from records of benchmarks/series_classifiers.py in results/series."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from generated import table

PAGE = Path("docs/time-series.md")
REGIONS = {"series-test": "test.jsonl", "series-variants": "cross_validation.jsonl"}
SETS = {
    "ArticularyWordRecognition": "AWR", "BasicMotions": "BM", "FingerMovements": "FM", "Handwriting": "HW",
    "JapaneseVowels": "JV", "LSST": "LSST", "SelfRegulationSCP1": "SCP1", "SpokenArabicDigits": "SAD",
    "UWaveGestureLibrary": "UW",
}  # fmt: skip
SMALL_TESTS = {"AtrialFibrillation": "AF", "StandWalkJump": "SWJ"}

Records = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""By classifier and set, one for each seed or fold."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks; there are no figures."""
    regions = {}
    for mark, name in REGIONS.items():
        records = read(root / "results" / "series" / name)
        regions[mark] = [
            "",
            *(lines(records, mark == "series-test") if records else ["Not measured yet."]),
            "",
        ]
    return regions, {}


def read(path: Path) -> Records:
    """The records of a file; of several for one fit, the last."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[record["classifier"]][record["dataset"]][record["number"]] = record
    return {name: {data: [*each.values()] for data, each in sets.items()} for name, sets in found.items()}


def lines(records: Records, with_small: bool) -> list[str]:
    """One row a classifier, best mean first, then those that lack a set."""
    columns = SETS | SMALL_TESTS if with_small else SETS
    names = sorted(
        records, key=lambda name: -mean(records[name], "accuracy") if is_whole(records[name]) else 1
    )
    head = ["classifier", *columns.values(), "mean", "log-loss", "calibration", "fit, s"]
    keys = ("log_loss", "calibration_error", "fit_seconds")
    rows = []
    for name in names:
        cells = [
            f"{100 * over(records[name][data], 'accuracy'):.1f}" if data in records[name] else "–"
            for data in columns
        ]
        whole = is_whole(records[name])
        figures = [f"{100 * mean(records[name], 'accuracy'):.1f}" if whole else "–"]
        figures += [number(mean(records[name], key)) if whole else "–" for key in keys]
        rows.append([name, *cells, *figures])
    return table(head, rows)


def is_whole(sets: Mapping[str, Any]) -> bool:
    """Whether every set of the mean is there."""
    return sets.keys() >= SETS.keys()


def mean(sets: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> float:
    """The mean over the sets of the means over seeds or folds."""
    return fmean(over(sets[name], key) for name in SETS)


def over(records: Sequence[Mapping[str, Any]], key: str) -> float:
    """The mean over seeds or folds."""
    return fmean(record[key] for record in records)


def number(value: float) -> str:
    """Three digits, as far as they matter."""
    return (
        f"{value:.0f}"
        if value >= 100
        else f"{value:.{max(0, 1 - math.floor(math.log10(max(value, 0.01))))}f}"
    )
