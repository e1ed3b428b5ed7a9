"""Tables of uncertainty: rows are methods, and paired tests follow from what the records keep."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_attention_lab.evidence.uncertainty import (
    training_costs,
    uncertainty_columns,
    uncertainty_curves,
    uncertainty_differences,
    uncertainty_rows,
)
from kernel_attention_lab.robustness import LabelledInputs, UncertainCases, uncertainty_figures

N, UNSEEN, DISTINCT, CLASSES = 900, 300, 60, 5


def measured(seed, sharpness, methods):
    """The entry of an imaginary model whose probabilities are those of the targets, sharpened."""
    truth = np.random.default_rng(0).dirichlet(np.full(CLASSES, 0.4), N)
    targets = np.array([np.random.default_rng(n).choice(CLASSES, p=row) for n, row in enumerate(truth)])
    known, corrupted = LabelledInputs([], targets), LabelledInputs([], targets[: 2 * DISTINCT])
    cases = UncertainCases(known, corrupted, [], distinct=DISTINCT)
    entry = {"cases": {"known": N, "corrupted": 2 * DISTINCT, "unseen": UNSEEN}, "methods": {}}
    for place, method in enumerate(methods):
        noisy = truth * np.random.default_rng(seed).uniform(0.9, 1.1, truth.shape)
        sharp = noisy ** (sharpness + place)
        sharp /= sharp.sum(1, keepdims=True)
        flat = np.random.default_rng(seed).dirichlet(np.full(CLASSES, 1 / sharpness), UNSEEN)
        predicted = {"known": sharp, "corrupted": sharp[: 2 * DISTINCT], "unseen": flat}
        entry["methods"][method] = {"seconds": 1.0} | uncertainty_figures(predicted, cases)
    return entry


@pytest.fixture
def records(make_record):
    """An over-confident mechanism in three seeds with its ensemble, and a calibrated one in two."""
    found = [
        make_record("soft", seed, uncertainty=measured(seed, 3.0, ["plain", "dropout"])) for seed in (0, 1)
    ]
    ensemble = measured(9, 1.5, ["ensemble"]) | {"members": 3}
    found.append(
        make_record("soft", 2, uncertainty=measured(2, 3.0, ["plain", "dropout"]), ensemble=ensemble)
    )
    return found + [
        make_record("gp", seed, uncertainty=measured(seed + 5, 1.0, ["samples"])) for seed in (0, 1)
    ]


def test_rows_are_methods_and_an_ensemble_stands_beside_every_seed(records):
    rows = uncertainty_rows(records)
    assert list(rows) == ["soft.plain", "soft.dropout", "soft.ensemble", "gp.samples"]
    assert list(rows["soft.ensemble"]["known_ece"]) == [0, 1, 2]
    shown = [each for each in uncertainty_columns(records) if each["row"] == "soft.ensemble"]
    assert len({each["column"] for each in shown}) == len(shown), "it is one model, shown once"
    kept = records[0].figures["robustness"]["uncertainty"]["methods"]["plain"]
    values = {column: cells[0].value for column, cells in rows["soft.plain"].items()}
    assert values["known_ece"] == kept["known"]["ece"]
    assert values["unseen_fpr95"] == kept["unseen"]["fpr95"]


def test_paired_tests_have_the_differences_of_the_figures(records):
    rows = uncertainty_rows(records)
    found = {
        (each["baseline"], each["column"]): each
        for each in uncertainty_differences(records, {"gp.samples": ["soft.plain", "soft.ensemble"]})
    }
    assert len(found) == 8
    # Confidences are kept to 1/63, likelihoods to 1/8 of a nat, scores in 64 levels; and bins have edges.
    close = {"known_ece": 0.02, "known_nll": 0.02, "corrupted_nll": 1e-4, "unseen_auroc": 0.01}
    for (baseline, column), each in found.items():
        ours, theirs = (
            np.mean([rows[row][column][seed].value for seed in (0, 1)]) for row in ("gp.samples", baseline)
        )
        assert each["difference"] == pytest.approx(ours - theirs, abs=close[column])
        assert each["seeds"] == [0, 1]
    assert found["soft.plain", "known_ece"]["is_better"]
    assert found["soft.plain", "known_nll"]["is_better"]
    assert found["soft.plain", "known_ece"]["high"] < 0


def test_a_model_is_no_better_than_itself(make_record):
    entry = measured(0, 2.0, ["plain"])
    records = [make_record(label, 0, uncertainty=entry) for label in ("a", "b")]
    for each in uncertainty_differences(records, {"a.plain": "b.plain"}):
        assert (each["difference"], each["p_value"], each["is_better"]) == (0, 1, None)


def test_curves_and_costs(records):
    curves = list(uncertainty_curves(records))
    risk = [each for each in curves if each["curve"].startswith("risk") and each["row"] == "gp.samples"]
    assert [each["seed"] for each in risk] == [0, 1]
    for each in risk:
        accuracy = records[3].figures["robustness"]["uncertainty"]["methods"]["samples"]["known"]["accuracy"]
        assert each["points"][-1] == [1, pytest.approx(1 - accuracy, abs=0.02)]
    (diagonal,) = [each for each in curves if each["row"] == "calibrated"]
    assert diagonal["points"] == [[0, 0], [1, 1]]
    assert not list(uncertainty_curves([]))
    assert training_costs(records) == {"soft": 900, "gp": 900, "ensemble": 2700}
