"""The tables of docs/time-series.md, from records of benchmarks/series_classifiers.py in results/series."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev
from types import MappingProxyType
from typing import Any

import numpy as np
from generated import NOTHING, svg_text, table

from kernel_attention_lab.statistics import holm, signed_rank_test

PAGE = Path("docs/time-series.md")
REPORTED = Path("results/reported/series_classifiers.json")
FIGURE = Path("docs/figures/ranks-series.svg")
FEWEST_RANKED = 3
WITHIN_TRAINING = {
    "mechanisms": "series-mechanisms", "ablation": "series-ablation", "readout": "series-readout",
    "stems": "series-stems",
}  # fmt: skip
"""Files of records of cross-validation on training splits, and the marks of their tables."""
BASELINES = {"mechanisms": "primal", "ablation": "whole", "readout": "whole"}
"""The rows of these tables that the others are tested against."""
SETS = {
    "ArticularyWordRecognition": "AWR", "BasicMotions": "BM", "FingerMovements": "FM", "Handwriting": "HW",
    "JapaneseVowels": "JV", "LSST": "LSST", "SelfRegulationSCP1": "SCP1", "SpokenArabicDigits": "SAD",
    "UWaveGestureLibrary": "UW",
}  # fmt: skip
SMALL_TESTS = {"AtrialFibrillation": "AF", "StandWalkJump": "SWJ"}
UNIVARIATE = {
    "ACSF1": "ACSF1", "ArrowHead": "ArrowHead", "GunPoint": "GunPoint", "ItalyPowerDemand": "ItalyPower",
    "OSULeaf": "OSULeaf", "PickupGestureWiimoteZ": "PickupGesture",
}  # fmt: skip
"""The univariate sets that aeon ships; training splits of four had a part in the choice of the defaults."""
SHIPPED = {
    "Coffee": "Coffee", "PigCVP": "PigCVP", "PLAID": "PLAID", "Trace": "Trace", "WatchExercises": "Watch",
}  # fmt: skip
"""Sets that other packages ship; the training splits of PigCVP and PLAID chose how steep a threshold is."""

DEVELOPED = {
    "JapaneseVowels": "JV 29", "FingerMovements": "FM 50", "Handwriting": "HW 152",
    "ArrowHead": "ArrowHead 251", "UWaveGestureLibrary": "UW 315",
    "PickupGestureWiimoteZ": "PickupGesture 361", "OSULeaf": "OSULeaf 427",
    "SelfRegulationSCP1": "SCP1 896", "PLAID": "PLAID 1344", "ACSF1": "ACSF1 1460", "PigCVP": "PigCVP 2000",
}  # fmt: skip
"""The sets whose training splits chose between stems, with the number of steps of the longest series."""
LONG = {name: label for name, label in DEVELOPED.items() if int(label.split()[-1]) > 256}
"""Those of them with more steps than members learn convolutions of."""

Records = Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]
"""By classifier and set, one for each seed or fold."""
Published = Mapping[str, Mapping[str, Any]]
"""What others report, by classifier: the source, and the accuracy by set."""


def texts(root: Path) -> tuple[dict[str, list[str]], dict[Path, str]]:
    """The lines of the regions of the page by their marks, and the files of the figures."""
    names = ("test", "univariate", "shipped", *WITHIN_TRAINING)
    found = {name: read(root / "results" / "series" / f"{name}.jsonl") for name in names}
    reported = root / REPORTED
    published = json.loads(reported.read_text(encoding="utf-8")) if reported.is_file() else {}
    regions = {
        "series-test": split_lines(found["test"], published),
        "series-univariate": split_lines(found["univariate"], published, UNIVARIATE, {}),
        "series-shipped": split_lines(found["shipped"], published, SHIPPED, {}),
    }
    for name, mark in WITHIN_TRAINING.items():
        averaged = {"stems": DEVELOPED, "readout": LONG}.get(name, SETS)
        tested = lines(found[name], averaged, baseline=BASELINES.get(name))
        regions[mark] = ["", *tested, ""] if found[name] else NOTHING
    svg = ranks_figure(found["test"])
    regions["series-ranks"] = ["", *rank_lines(found["test"], svg is not None), ""]
    return regions, {} if svg is None else {FIGURE: svg}


def split_lines(
    records: Records,
    published: Published,
    averaged: Mapping[str, str] = SETS,
    others: Mapping[str, str] = SMALL_TESTS,
) -> list[str]:
    """The table of the test splits, over how many seeds its figures are, and what others report."""
    if not records:
        return NOTHING
    reports = {
        name: each for name, each in published.items() if not averaged.keys().isdisjoint(each["accuracy"])
    }
    measured = lines(records, averaged, others, with_spread=True, published=reports)
    found = ["", *measured, "", seeds_text(records), ""]
    if reports:
        sources = ". ".join(f"{name}: {report['source']}" for name, report in reports.items())
        found += [f"\\* Published for whole splits, not measured here. {sources}.", ""]
    return found


def published_rows(
    published: Published, averaged: Mapping[str, str], columns: Iterable[str]
) -> Iterator[list[str]]:
    """A row for each report: accuracies, and their mean where it has all sets."""
    for name, report in published.items():
        accuracy = report["accuracy"]
        cells = [per_cent([accuracy[data]], False) if data in accuracy else "–" for data in columns]
        whole = accuracy.keys() >= averaged.keys()
        average = per_cent([accuracy[data] for data in averaged], False) if whole else "–"
        yield [f"{name} \\*", *cells, average, "–", "–", "–"]


def seeds_text(records: Records) -> str:
    """How many seeds every classifier has."""
    counts: dict[str, list[str]] = defaultdict(list)
    for name, sets in records.items():
        numbers = {len(each) for each in sets.values()}
        fewest, most = min(numbers), max(numbers)
        several = f"{fewest} to {most} seeds" if fewest < most else f"{most} seeds"
        counts["one seed" if most == 1 else several].append(name)
    parts = [f"{', '.join(sorted(names))}: {count}" for count, names in sorted(counts.items())]
    spread = "" if set(counts) == {"one seed"} else "Mean ± standard deviation over seeds. "
    return f"{spread}{'; '.join(parts)}."


def compared(records: Records) -> dict[str, dict[str, float]]:
    """The mean accuracy of every classifier that has all sets, by set."""
    return {
        name: {data: over(sets[data], "accuracy") for data in SETS}
        for name, sets in records.items()
        if sets.keys() >= SETS.keys()
    }


def ranks_figure(records: Records) -> str | None:
    """The critical-difference diagram as SVG; None for fewer than three classifiers."""
    from kernel_attention_lab.reporting.suite_plots import critical_difference
    from kernel_attention_lab.reproduction.findings import SIGNIFICANT

    scores = compared(records)
    if len(scores) < FEWEST_RANKED:
        return None
    figure = critical_difference(scores, larger_is_better=True, alpha=SIGNIFICANT)
    return None if figure is None else svg_text(figure)


def rank_lines(records: Records, has_figure: bool) -> list[str]:
    """The diagram with what it says, or why there is none."""
    if not has_figure:
        have = len(compared(records))
        return [
            f"The diagram of ranks needs {FEWEST_RANKED} classifiers with every set; {have} have them so far."
        ]
    return [
        f"![Mean ranks of the classifiers]({FIGURE.relative_to(PAGE.parent).as_posix()})",
        "",
        f"Mean ranks of the mean accuracies over the {len(SETS)} sets of the mean, 1 is best. Bars join "
        "classifiers between which Friedman's test and Wilcoxon tests with Holm's adjustment find no "
        "difference at 5 %.",
    ]


def read(path: Path) -> Records:
    """The records of a file; of several for one fit, the last."""
    if not path.is_file():
        return {}
    found: dict[str, dict[str, dict[int, Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(dict))
    for line in path.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        found[record["classifier"]][record["dataset"]][record["number"]] = record
    return {name: {data: [*each.values()] for data, each in sets.items()} for name, sets in found.items()}


def lines(
    records: Records,
    averaged: Mapping[str, str] = SETS,
    others: Mapping[str, str] = MappingProxyType({}),
    *,
    with_spread: bool = False,
    published: Published = MappingProxyType({}),
    baseline: str | None = None,
) -> list[str]:
    """One row a classifier: best mean first, then those that lack a set of it, then what others report.

    With a ``baseline`` there is a last column: the p value of each difference from it.
    """
    whole = {
        name: {data: sets[data] for data in averaged}
        for name, sets in records.items()
        if sets.keys() >= averaged.keys()
    }
    names = sorted(records, key=lambda name: -mean(whole[name], "accuracy") if name in whole else 1)
    columns = {**averaged, **others}
    head = ["classifier", *columns.values(), "mean", "log-loss", "calibration", "fit, s"]
    keys = ("log_loss", "calibration_error", "fit_seconds")
    rows = []
    for name in names:
        sets = records[name]
        cells = [
            per_cent([record["accuracy"] for record in sets[data]], with_spread) if data in sets else "–"
            for data in columns
        ]
        figures = ["–"] * (1 + len(keys))
        if name in whole:
            figures = [per_cent(means_by_seed(whole[name]), with_spread)]
            figures += [number(mean(whole[name], key)) for key in keys]
        rows.append([name, *cells, *figures])
    if baseline in whole:
        chances = chances_against(baseline, whole)
        rows = [[*row, chances.get(row[0], "")] for row in rows]
        head.append(f"p against {baseline}")
    return table(head, [*rows, *published_rows(published, averaged, columns)])


def chances_against(baseline: str, records: Records) -> dict[str, str]:
    """p values of every other row: Wilcoxon's signed-rank test over the sets, Holm's adjustment."""
    means = {name: [over(each, "accuracy") for each in records[name].values()] for name in records}
    others = {name: np.subtract(means[name], means[baseline]) for name in means if name != baseline}
    chances = holm([signed_rank_test(differences) for differences in others.values()])
    return {name: f"{chance:.2g}" for name, chance in zip(others, chances, strict=True)}


def per_cent(values: Sequence[float], with_spread: bool) -> str:
    """The mean of shares in per cent, with the sample deviation of several if wanted."""
    spread = f" ± {100 * stdev(values):.1f}" if with_spread and len(values) > 1 else ""
    return f"{100 * fmean(values):.1f}{spread}"


def means_by_seed(sets: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[float]:
    """The mean accuracy over the sets, for every seed that all of them have; one mean where seeds differ."""
    by_set = [{record["number"]: record["accuracy"] for record in records} for records in sets.values()]
    if any(numbers.keys() != by_set[0].keys() for numbers in by_set):
        return [mean(sets, "accuracy")]
    return [fmean(numbers[seed] for numbers in by_set) for seed in by_set[0]]


def mean(sets: Mapping[str, Sequence[Mapping[str, Any]]], key: str) -> float:
    """The mean over the sets of the means over seeds or folds."""
    return fmean(over(records, key) for records in sets.values())


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
