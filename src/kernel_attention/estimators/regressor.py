"""The regressor of sequences."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin

from kernel_attention.estimators.base import AttentionEstimator
from kernel_attention.experiments.data import SequenceSplit


class AttentionRegressor(RegressorMixin, AttentionEstimator):
    """Regressor of sequences: an ensemble of encoders with the attention mechanism of your choice.

    Parameters, ``X`` and errors are those of ``AttentionClassifier``; ``label_smoothing``, ``class_weight``
    and ``calibrate`` have no effect. ``y`` holds n numbers. The loss is the mean squared error of
    standardised targets. ``models_`` and ``history_`` (``train_rmse``, ``val_rmse``, ``val_r2``) are in units
    of ``target_scale_``, predictions in the units of y.

    Attributes:
        target_mean_: mean of the training targets.
        target_scale_: their standard deviation; 1 where they are constant.
        others: those of ``AttentionClassifier`` without ``classes_`` and ``temperature_``.
    """

    target_mean_: float
    target_scale_: float

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, validation_data: tuple[Any, Any] | None = None
    ) -> Self:
        """Train on X and its targets y, (n,); the other arguments are those of ``AttentionClassifier``."""
        sequences, y = self._checked(X, y)
        sequences, y, weights = self._weighted(sequences, y.astype(np.float64), sample_weight)
        mean, scale = float(y.mean()), float(y.std()) or 1.0
        validation = None
        if validation_data is not None:
            held_out, targets = self._checked(*validation_data)
            standard = (targets.astype(np.float64) - mean) / scale
            validation = SequenceSplit(held_out, standard.astype(np.float32))
        split = SequenceSplit(sequences, ((y - mean) / scale).astype(np.float32), weights)
        self._train(split, 1, validation)
        self.target_mean_, self.target_scale_ = mean, scale
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The value of every case, (n,) float64."""
        return self._outputs(X).double().squeeze(-1).numpy() * self.target_scale_ + self.target_mean_
