"""The columns of the robustness tables, from the records of image runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.comparison import (
    CorruptionErrors,
    Detection,
    Measurement,
    evaluation_figure,
)
from kernel_attention_lab.evidence.records import ResultRecord
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.robustness import corruption_errors, levels_of, mean_corruption_error

PIXEL_STEP = 1 / 255

Columns = dict[str, dict[int, Measurement]]


def robustness_columns(
    records: Sequence[ResultRecord], protocol: str = "pixel", eps: float = PIXEL_STEP
) -> dict[str, Columns]:
    """Accuracies under the attacks of a protocol at one eps, under corruptions, and detection, by row.

    Where a record has an attack several times, the plain one counts: not transferred, with the exact gradient
    and one start; of these the one on the most images.

    Returns:
        By label, column and seed. The columns are ``test`` (accuracy on the whole test split), the attacks'
        names, ``corruptions`` (mean accuracy) and ``aupr``. Records of an earlier version lack the answers
        behind ``test`` and the scores behind ``aupr``, which then cannot be compared.

    Raises:
        InputError: where records were attacked on different images.
    """
    _require_same_images(records)
    rows: dict[str, Columns] = {}
    for record in records:
        row = rows.setdefault(record.label, {})
        row.setdefault("test", {})[record.seed] = evaluation_figure(record.figures["evaluation"], "accuracy")
        for entry in _plain(record, protocol):
            if entry["eps"] is None or _is_at(entry, eps):
                _keep_larger(row.setdefault(entry["attack"], {}), record.seed, _measured(entry))
        corrupted = corruptions_of(record)
        if corrupted is not None:
            row.setdefault("corruptions", {})[record.seed] = _measured_corruptions(corrupted)
        detected = _robustness(record).get("out_of_distribution")
        if detected is not None:
            levels = levels_of(detected)
            paired = None if levels is None else Detection(*levels)
            row.setdefault("aupr", {})[record.seed] = Measurement(float(detected["aupr"]), paired=paired)
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


def corruption_figures(records: Sequence[ResultRecord]) -> dict[str, dict[int, Measurement]]:
    """The mean corruption error against AlexNet by row and seed, to compare relative to another row's."""
    figures: dict[str, dict[int, Measurement]] = {}
    for record in records:
        found = corruptions_of(record)
        if found is not None:
            answers = [_answers(texts, found["cases"]) for texts in found["bits"].values()]
            wrong = np.stack([(~each).sum(axis=0) for each in answers])
            value = mean_corruption_error(corruption_errors(found))
            measured = Measurement(value, paired=CorruptionErrors(wrong))
            figures.setdefault(record.label, {})[record.seed] = measured
    return figures


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


def variant_columns(records: Sequence[ResultRecord], eps: float = PIXEL_STEP) -> dict[str, Columns]:
    """Accuracies under the attacks that show a masked gradient, by row, column and seed.

    The columns are named after what sets them apart from plain PGD or FGSM: made against another model, with
    restarts, with a surrogate of the gradient.
    """
    rows: dict[str, Columns] = {}
    for record in records:
        for entry in _attacks(record, "pixel"):
            if not _is_plain(entry) and _is_at(entry, eps):
                cells = rows.setdefault(record.label, {}).setdefault(_variant(entry), {})
                _keep_larger(cells, record.seed, _measured(entry))
    return rows


def corruptions_of(record: ResultRecord) -> Mapping[str, Any] | None:
    """The record's figures of ``corruption_accuracies``; None where there are none."""
    return _robustness(record).get("corruptions")


def _robustness(record: ResultRecord) -> Mapping[str, Any]:
    return record.figures.get("robustness", {})


def _attacks(record: ResultRecord, protocol: str) -> list[Mapping[str, Any]]:
    return [entry for entry in _robustness(record).get("attacks", []) if entry["protocol"] == protocol]


def _plain(record: ResultRecord, protocol: str) -> list[Mapping[str, Any]]:
    return [entry for entry in _attacks(record, protocol) if _is_plain(entry)]


def _is_plain(entry: Mapping[str, Any]) -> bool:
    options = entry["options"]
    is_exact = options.get("restarts", 1) == 1 and options.get("gradient", "exact") == "exact"
    return is_exact and not entry["transferred"]


def _is_at(entry: Mapping[str, Any], eps: float) -> bool:
    return entry["eps"] is not None and math.isclose(entry["eps"], eps, rel_tol=1e-6)


def _variant(entry: Mapping[str, Any]) -> str:
    options = entry["options"]
    words = [entry["attack"].upper()]
    words += ["transferred"] if entry["transferred"] else []
    words += [f"{options['restarts']} restarts"] if options.get("restarts", 1) > 1 else []
    gradient = options.get("gradient", "exact")
    words += [f"{gradient.replace('_', '-')} gradient"] if gradient != "exact" else []
    return ", ".join(words)


def _require_same_images(records: Sequence[ResultRecord]) -> None:
    """InputError unless all records that name the images they were attacked on name the same."""
    named = [record for record in records if "images" in _robustness(record)]
    for record in named[1:]:
        if _robustness(record)["images"] != _robustness(named[0])["images"]:
            raise InputError(
                f"records {named[0].file_name} and {record.file_name} were attacked on different images"
            )


def _measured(entry: Mapping[str, Any]) -> Measurement:
    return Measurement(float(entry["accuracy"]), unpack_bits(entry["bits"], entry["cases"])[None])


def _measured_corruptions(found: Mapping[str, Any]) -> Measurement:
    """A trial for every corruption and severity."""
    bits = [text for texts in found["bits"].values() for text in texts]
    return Measurement(float(found["accuracy"]), _answers(bits, found["cases"]))


def _answers(texts: Sequence[str], cases: int) -> np.ndarray:
    return np.stack([unpack_bits(text, cases) for text in texts])


def _keep_larger(cell: dict[int, Measurement], seed: int, measured: Measurement) -> None:
    """Keep what was measured on more images."""
    if seed not in cell or measured.cases > cell[seed].cases:
        cell[seed] = measured
