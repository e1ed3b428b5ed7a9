"""aeon's own estimator checks on the adapters, and aeon's loops and pipelines around the estimators."""

from __future__ import annotations

import numpy as np
import pytest
from aeon.classification.compose import ClassifierPipeline
from aeon.testing.estimator_checking import check_estimator
from aeon.transformations.collection import Normalizer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline

import kernel_attention as ka
from kernel_attention.estimators import AttentionClassifier
from kernel_attention.estimators.aeon import AeonAttentionClassifier, AeonAttentionRegressor


@pytest.mark.parametrize(
    "adapter", [AeonAttentionClassifier, pytest.param(AeonAttentionRegressor, marks=pytest.mark.slow)]
)
def test_aeon_checks(adapter):
    results = check_estimator(adapter)
    assert {name: result for name, result in results.items() if result != "PASSED"} == {}
    assert len(results) > 20


def test_an_adapter_predicts_what_its_estimator_does(estimator, ragged):
    X, labels, values = ragged
    is_classifier = isinstance(estimator, AttentionClassifier)
    y = labels if is_classifier else values
    adapter = (AeonAttentionClassifier if is_classifier else AeonAttentionRegressor)(estimator)
    predicted = adapter.fit(X, y).predict(X)
    assert (predicted == estimator.fit(X, y).predict(X)).all()
    assert adapter.estimator_ is not estimator
    if is_classifier:
        assert (adapter.predict_proba(X) == estimator.predict_proba(X)).all()
    assert adapter.set_params(estimator__epochs=1).get_params()["estimator__epochs"] == 1


def test_gaps_are_refused_or_filled(arrays, small):
    X, labels, _ = arrays
    X[3, 1, 2] = np.nan
    with pytest.raises(ka.InputError, match=r"missing value .* in case 3, channel 1, step 2"):
        AeonAttentionClassifier(AttentionClassifier(**small)).fit(X, labels)
    filled = AttentionClassifier(**small, missing="interpolate")
    assert AeonAttentionClassifier(filled).fit(X, labels).predict(X).shape == (23,)


def test_after_a_transformer_of_aeon(arrays, small):
    X, labels, _ = arrays
    pipeline = make_pipeline(Normalizer(), AttentionClassifier(**small)).fit(X, labels)
    assert pipeline.predict(X).shape == (23,)
    adapted = ClassifierPipeline(Normalizer(), AeonAttentionClassifier(AttentionClassifier(**small)))
    assert (adapted.fit(X, labels).predict(X) == pipeline.predict(X)).all()


def test_adapters_are_searched_and_validated(arrays, small):
    X, labels, _ = arrays
    adapter = AeonAttentionClassifier(AttentionClassifier(**small))
    assert cross_val_score(adapter, X, labels, cv=2, error_score="raise").shape == (2,)
    grid = {"estimator__attention__rank": [2, 4]}
    best = GridSearchCV(adapter, grid, cv=2, error_score="raise").fit(X, labels).best_estimator_
    layer = best.estimator_.model_.encoder.layers[0].attention
    assert layer.rank == best.estimator.attention_options["rank"]
