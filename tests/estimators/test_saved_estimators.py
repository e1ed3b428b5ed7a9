"""Estimators that commits 4ea74c81 and a4829de6 saved predict what they predicted then."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kernel_attention as ka

FIXTURES = Path(__file__).parents[1] / "fixtures"


@pytest.mark.parametrize(
    ("name", "method"), [("AttentionClassifier", "predict_proba"), ("AttentionRegressor", "predict")]
)
def test_an_estimator_of_an_earlier_release_predicts_as_it_did(name, method):
    """Up to the rounding of another CPU, which is that between float32 and float64, with a factor of 8."""
    stored = json.loads((FIXTURES / "estimators.json").read_text())
    estimator = getattr(ka, name).load(FIXTURES / f"{name}.safetensors")
    found = getattr(estimator, method)(np.array(stored["series"]))
    assert abs(found - stored[name]["predictions"]).max() <= 8 * stored[name]["rounding"]


def test_a_classifier_in_closed_form_keeps_its_views_and_predictions():
    stored = json.loads((FIXTURES / "closed_form.json").read_text())
    classifier = ka.AttentionClassifier.load(FIXTURES / "ClosedForm.safetensors")
    assert list(classifier.closed_form_.views) == stored["views"]
    found = classifier.predict_proba(np.array(stored["series"]))
    assert abs(found - stored["predictions"]).max() <= 8 * stored["rounding"]
