"""aeon's own estimator checks, through the thinnest adapter to its base classes.

Our estimators do not inherit from aeon's: aeon brings numba, and its base class judges lengths and NaN before
we see them. The adapter is what a person writes who wants aeon's ``BaseClassifier``.
"""

import pytest
from aeon.classification.base import BaseClassifier
from aeon.regression.base import BaseRegressor
from aeon.testing.estimator_checking import check_estimator
from aeon.transformations.collection import Normalizer
from sklearn.pipeline import make_pipeline

from kernel_attention.estimators import AttentionClassifier, AttentionRegressor

QUICK = {
    "embed_dim": 4,
    "num_heads": 2,
    "num_layers": 1,
    "feedforward_dim": 4,
    "epochs": 1,
    "n_estimators": 1,
    "calibrate": False,
    "accelerator": "cpu",
}
TAGS = {
    "X_inner_type": ["np-list", "numpy3D"],
    "capability:multivariate": True,
    "capability:unequal_length": True,
    "capability:missing_values": True,
    "algorithm_type": "deeplearning",
}


class _Adapter:
    """Arguments, training and prediction for both."""

    _tags = TAGS

    def __init__(self, max_len=40, random_state=None):
        self.max_len = max_len
        self.random_state = random_state
        super().__init__()

    def _fit(self, X, y):
        options = {"max_len": self.max_len, "random_state": self.random_state, "missing": "interpolate"}
        self.estimator_ = self._wrapped(**QUICK, **options).fit(X, y)
        return self

    def _predict(self, X):
        return self.estimator_.predict(X)


class AeonAttentionClassifier(_Adapter, BaseClassifier):
    _wrapped = AttentionClassifier

    def _predict_proba(self, X):
        return self.estimator_.predict_proba(X)


class AeonAttentionRegressor(_Adapter, BaseRegressor):
    _wrapped = AttentionRegressor


@pytest.mark.parametrize("adapter", [AeonAttentionClassifier, AeonAttentionRegressor])
def test_aeon_checks(adapter):
    results = check_estimator(adapter)
    assert {name: result for name, result in results.items() if result != "PASSED"} == {}
    assert len(results) > 20


def test_after_a_transformer_of_aeon(arrays, small):
    X, labels, _ = arrays
    pipeline = make_pipeline(Normalizer(), AttentionClassifier(**small)).fit(X, labels)
    assert pipeline.predict(X).shape == (23,)
