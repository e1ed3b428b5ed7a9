"""The regressor of sequences."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
from sklearn.base import RegressorMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.estimators.base import FEWEST_JUDGED, AttentionEstimator
from kernel_attention.experiments.data import SequenceSplit


class AttentionRegressor(RegressorMixin, AttentionEstimator):
    """Regressor of sequences: an ensemble of encoders with the attention mechanism of your choice.

    Parameters, ``X`` and errors are those of ``AttentionClassifier``. ``label_smoothing`` and
    ``class_weight`` have no effect, and ``calibrate`` holds cases out for ``predict_interval``. ``y`` holds n
    numbers. The loss is the mean squared error of standardised targets. ``models_`` and ``history_``
    (``train_rmse``, ``val_rmse``, ``val_r2``) are in units of ``target_scale_``, predictions in the units of
    y.

    Attributes:
        target_mean_: mean of the training targets.
        target_scale_: their standard deviation; 1 where they are constant.
        residuals_: absolute errors on held-out cases, in units of ``target_scale_``, sorted.
        others: those of ``AttentionClassifier`` without ``classes_`` and ``temperature_``.
    """

    target_mean_: float
    target_scale_: float
    residuals_: list[float]

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

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """An interval around every prediction that holds its target with this probability, (n, 2) float64.

        Split conformal prediction (Vovk et al. 2005; Lei et al. 2018): the half-width is a quantile of the
        absolute errors on held-out cases, so it is the same for all cases. The guarantee is for cases drawn
        as those of fit were, and for the members that held cases out; the mean over all members errs less.

        Raises:
            InputError: where there were no held-out cases, or too few for this coverage.
        """
        if not isinstance(coverage, float) or not 0 < coverage < 1:
            raise InputError(f"coverage={coverage!r} must lie between 0 and 1, both excluded")
        check_is_fitted(self)
        place = math.ceil((len(self.residuals_) + 1) * coverage)
        if place > len(self.residuals_):
            raise InputError(
                f"coverage={coverage} needs at least {math.ceil(coverage / (1 - coverage))} held-out cases, "
                f"there were {len(self.residuals_)}: fit with calibrate=True, or with validation data"
            )
        half_width = self.residuals_[place - 1] * self.target_scale_
        predicted = self.predict(X)
        return np.stack([predicted - half_width, predicted + half_width], axis=1)

    def _answer(self, output: Tensor) -> Callable[[Tensor], Tensor]:
        """The predicted value."""
        return lambda outputs: outputs[:, 0] * self.target_scale_ + self.target_mean_

    def _can_judge(self, split: SequenceSplit) -> bool:
        return bool(self.calibrate and len(split) >= FEWEST_JUDGED)

    def _judge(self, judged: list[tuple[Tensor, SequenceSplit]]) -> None:
        errors = [np.abs(outputs.squeeze(-1).numpy() - split.targets) for outputs, split in judged]
        self.residuals_ = sorted(float(error) for part in errors for error in part)
