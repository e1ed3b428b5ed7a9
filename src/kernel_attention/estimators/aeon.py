"""The estimators behind aeon's base classes, for tools that ask for these. Needs the extra ``timeseries``.

scikit-learn's tools and aeon's loops over resamples take ``AttentionClassifier`` itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import numpy as np
from aeon.classification.base import BaseClassifier
from aeon.regression.base import BaseRegressor
from sklearn.base import clone

from kernel_attention.estimators.base import AttentionEstimator
from kernel_attention.estimators.classifier import AttentionClassifier
from kernel_attention.estimators.regressor import AttentionRegressor

__all__ = ["AeonAttentionClassifier", "AeonAttentionRegressor"]

_TAGS: dict[str, Any] = {
    "X_inner_type": ["np-list", "numpy3D"],
    "capability:multivariate": True,
    "capability:unequal_length": True,
    "capability:missing_values": True,
    "algorithm_type": "deeplearning",
}
_QUICK: dict[str, Any] = {
    "embed_dim": 4, "num_heads": 2, "num_layers": 1, "feedforward_dim": 4, "epochs": 1, "n_estimators": 1,
    "calibrate": False, "missing": "interpolate", "random_state": 0, "accelerator": "cpu",
}  # fmt: skip


class _AeonAdapter:
    """The estimator that does the work, and the calls that aeon's base classes make."""

    _tags = _TAGS
    _kind: ClassVar[type[AttentionEstimator]]

    def __init__(self, estimator: AttentionEstimator | None = None) -> None:
        self.estimator = estimator
        super().__init__()

    def _fit(self, X: Any, y: np.ndarray) -> Self:
        estimator = self._kind() if self.estimator is None else clone(self.estimator)
        self.estimator_ = estimator.fit(X, y)
        return self

    def _predict(self, X: Any) -> np.ndarray:
        return self.estimator_.predict(X)

    @classmethod
    def _get_test_params(cls, parameter_set: str = "default") -> Mapping[str, Any]:
        """Parameters for aeon's estimator checks."""
        return {"estimator": cls._kind(**_QUICK)}


class AeonAttentionClassifier(_AeonAdapter, BaseClassifier):
    """``AttentionClassifier`` as a classifier of aeon.

    aeon's base class checks and converts X and y. Series of different lengths are taken as they are. Missing
    values need an estimator with ``missing="interpolate"``.

    Args:
        estimator: an ``AttentionClassifier``, which is cloned; None: one with the default parameters. Nested
            parameters are reached as ``estimator__epochs``.

    Attributes:
        estimator_: the fitted ``AttentionClassifier``.
    """

    _kind = AttentionClassifier

    def _predict_proba(self, X: Any) -> np.ndarray:
        return self.estimator_.predict_proba(X)


class AeonAttentionRegressor(_AeonAdapter, BaseRegressor):
    """``AttentionRegressor`` as a regressor of aeon; see ``AeonAttentionClassifier``.

    Args:
        estimator: an ``AttentionRegressor``, which is cloned; None: one with the default parameters.

    Attributes:
        estimator_: the fitted ``AttentionRegressor``.
    """

    _kind = AttentionRegressor
