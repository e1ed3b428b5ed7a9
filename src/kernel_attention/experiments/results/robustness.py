"""The columns of the robustness tables, from the records of image runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention.experiments.results.comparison import Measurement
from kernel_attention.experiments.results.records import ResultRecord
from kernel_attention.experiments.robustness import corruption_errors, mean_corruption_error
from kernel_attention.experiments.statistics import unpack_bits

PIXEL_STEP = 1 / 255

Columns = dict[str, dict[int, Measurement]]


def robustness_columns(
    records: Sequence[ResultRecord], protocol: str = "pixel", eps: float = PIXEL_STEP
) -> dict[str, Columns]:
    """Accuracies under the attacks of a protocol at one eps, under corruptions, and detection, by row.

    Where a record has an attack several times, the plain one counts: not transferred, with the exact gradient
    and one start; of these the one on the most images.

    Returns:
        By label, column and seed. The columns are the attacks' names, ``corruptions`` (mean accuracy) and
        ``aupr``.
    """
    rows: dict[str, Columns] = {}
    for record in records:
        row = rows.setdefault(record.label, {})
        for entry in _plain(record, protocol):
            if entry["eps"] is None or math.isclose(entry["eps"], eps, rel_tol=1e-6):
                _keep_larger(row.setdefault(entry["attack"], {}), record.seed, _measured(entry))
        corrupted = corruptions_of(record)
        if corrupted is not None:
            row.setdefault("corruptions", {})[record.seed] = _measured_corruptions(corrupted)
        detected = _robustness(record).get("out_of_distribution")
        if detected is not None:
            row.setdefault("aupr", {})[record.seed] = Measurement(float(detected["aupr"]))
    return rows


def relative_corruption_errors(
    records: Sequence[ResultRecord], baselines: Mapping[str, str]
) -> dict[str, dict[int, Measurement]]:
    """The mean corruption error of every row relative to its baseline with the same seed, by row and seed.

    A row without a baseline is its own, with 1.
    """
    known = {(record.label, record.seed): found for record in records if (found := corruptions_of(record))}
    errors: dict[str, dict[int, Measurement]] = {}
    for (label, seed), found in known.items():
        reference = known.get((baselines.get(label, label), seed))
        if reference is not None:
            value = mean_corruption_error(corruption_errors(found), corruption_errors(reference))
            errors.setdefault(label, {})[seed] = Measurement(value)
    return errors


def attack_curves(
    records: Sequence[ResultRecord], protocol: str, attack: str
) -> dict[str, dict[float, dict[int, Measurement]]]:
    """Accuracies under one attack by row, eps and seed."""
    curves: dict[str, dict[float, dict[int, Measurement]]] = {}
    for record in records:
        for entry in _plain(record, protocol):
            if entry["attack"] == attack and entry["eps"] is not None:
                points = curves.setdefault(record.label, {}).setdefault(entry["eps"], {})
                _keep_larger(points, record.seed, _measured(entry))
    return curves


def corruptions_of(record: ResultRecord) -> Mapping[str, Any] | None:
    """The record's figures of ``corruption_accuracies``; None where there are none."""
    return _robustness(record).get("corruptions")


def _robustness(record: ResultRecord) -> Mapping[str, Any]:
    return record.figures.get("robustness", {})


def _plain(record: ResultRecord, protocol: str) -> list[Mapping[str, Any]]:
    return [
        entry
        for entry in _robustness(record).get("attacks", [])
        if entry["protocol"] == protocol
        and not entry["transferred"]
        and entry["options"].get("restarts", 1) == 1
        and entry["options"].get("gradient", "exact") == "exact"
    ]


def _measured(entry: Mapping[str, Any]) -> Measurement:
    return Measurement(float(entry["accuracy"]), unpack_bits(entry["bits"], entry["cases"])[None])


def _measured_corruptions(found: Mapping[str, Any]) -> Measurement:
    """A trial for every corruption and severity."""
    bits = [text for texts in found["bits"].values() for text in texts]
    return Measurement(
        float(found["accuracy"]), np.stack([unpack_bits(text, found["cases"]) for text in bits])
    )


def _keep_larger(cell: dict[int, Measurement], seed: int, measured: Measurement) -> None:
    """Keep what was measured on more images."""
    if seed not in cell or measured.cases > cell[seed].cases:
        cell[seed] = measured
