"""The regressor of sequences."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import RegressorMixin
from sklearn.utils import check_array, check_consistent_length
from sklearn.utils.validation import check_is_fitted
from torch import Tensor

from kernel_attention.containers import as_targets
from kernel_attention.errors import InputError
from kernel_attention.estimators.base import AttentionEstimator
from kernel_attention.estimators.ensemble import FEWEST_JUDGED
from kernel_attention.estimators.parameters import refused_in_one_line
from kernel_attention.series import SequenceSplit, as_sequences
from kernel_attention.training.modes import in_plain_modes

_LARGEST = 1e150  # its square is finite in float64
_SMALLEST = 1e-140  # its square has all digits


class AttentionRegressor(RegressorMixin, AttentionEstimator):
    """Regressor of sequences: an ensemble of encoders with the attention mechanism of your choice.

    Parameters, ``X`` and errors are those of ``AttentionClassifier``. ``label_smoothing`` and
    ``class_weight`` have no effect, and ``calibrate`` holds cases out for ``predict_interval``. ``y`` holds n
    numbers, or m numbers of each case, (n, m), which one model learns together. The loss is the mean squared
    error of standardised targets. ``models_`` and ``history_`` (``train_rmse``, ``val_rmse``, ``val_r2``) are
    in units of ``target_scale_``, predictions in the units and the shape of y. A warm start keeps the units
    of the first fit.

    Attributes:
        target_mean_: mean of the training targets; of y (n, m), a list of m.
        target_scale_: their standard deviation; 0 where they are constant, and that value is predicted. Of y
            (n, m), a list of m.
        residuals_: absolute errors on held-out cases, in units of ``target_scale_``, sorted; of y (n, m),
            lists of m.
        others: those of ``AttentionClassifier`` without ``classes_`` and ``temperature_``.
    """

    target_mean_: float | list[float]
    target_scale_: float | list[float]
    residuals_: list[Any]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

    def fit(
        self, X: Any, y: Any, sample_weight: Any = None, *, validation_data: tuple[Any, Any] | None = None
    ) -> Self:
        """Train on X and its targets y, (n,) or (n, m); other arguments as in ``AttentionClassifier``."""
        names = self._names(X)
        sequences, y = self._checked(X, y)
        sequences, y, weights = self._weighted(sequences, y, sample_weight)
        shape = y.shape[1:]
        if self.warm_start and "models_" in vars(self) and np.shape(self.target_mean_) == shape:
            mean, scale = np.asarray(self.target_mean_), np.asarray(self.target_scale_)
            # A constant target has no unit that another one could be learnt in.
            own_mean, own_scale = _units(y)
            mean, scale = np.where(scale > 0, mean, own_mean), np.where(scale > 0, scale, own_scale)
        else:
            mean, scale = _units(y)

        def standard(sequences: list[np.ndarray], targets: np.ndarray) -> SequenceSplit:
            values = _standardized(targets, mean, scale)
            return SequenceSplit(sequences, values[:, 0] if shape == (1,) else values)

        validation = None
        if validation_data is not None:
            held_out, targets = self._checked_pair(validation_data, names)
            if targets.shape[1:] != shape:
                raise InputError(
                    f"validation_data has targets of shape {targets.shape}, y has shape {y.shape}"
                )
            validation = standard(held_out, targets)
        split = dataclasses.replace(standard(sequences, y), weights=weights)
        self._train(split, math.prod(shape), validation)
        self.target_mean_, self.target_scale_ = mean.tolist(), scale.tolist()
        self._remember_names(names)
        return self

    def predict(self, X: Any) -> np.ndarray:
        """The value or the values of every case, (n,) or (n, m) float64, in the shape of y."""
        return self._in_units(self._outputs(X)).numpy()

    def predict_interval(self, X: Any, coverage: float = 0.9) -> np.ndarray:
        """An interval around every prediction that holds its target with this probability, (n, 2) float64.

        Where y has m targets: (n, m, 2); each target has this probability for itself.

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
        half_width = np.asarray(self.residuals_[place - 1]) * np.asarray(self.target_scale_)
        predicted = self.predict(X)
        return np.stack([predicted - half_width, predicted + half_width], axis=-1)

    def _checked(self, X: Any, y: Any) -> tuple[list[np.ndarray], np.ndarray]:
        if y is None:
            raise InputError(f"{type(self).__name__} requires y to be passed, but the target y is None")
        sequences = as_sequences(X, self.missing)
        with refused_in_one_line("y"):
            plain = as_targets(y)
            if plain.dtype.kind in "cmM":
                raise InputError(f"y: {plain.dtype} is not accepted; targets are real numbers")
            targets = check_array(plain, dtype=np.float64, ensure_2d=False, input_name="y")
            check_consistent_length(sequences, targets)
        largest = np.abs(targets).max()
        if largest > _LARGEST:
            raise InputError(f"y has a value of size {largest:g}; accepted: up to {_LARGEST:g}")
        return sequences, targets

    @in_plain_modes
    def _in_units(self, outputs: Tensor) -> Tensor:
        """Outputs in the units and the shape of y, float64."""
        units = (self.target_mean_, self.target_scale_)
        mean, scale = (torch.tensor(value, dtype=torch.float64) for value in units)
        return (outputs.double() if mean.dim() else outputs.double().squeeze(-1)) * scale + mean

    def _answer(self, output: Tensor, column: int | None) -> Callable[[Tensor], Tensor]:
        """A predicted value, the first unless ``column`` says which."""
        return lambda outputs: self._in_units(outputs).reshape(len(outputs), -1)[:, column or 0]

    def _can_judge(self, split: SequenceSplit) -> bool:
        return bool(self.calibrate and len(split) >= FEWEST_JUDGED)

    def _losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        errors = outputs.double() - targets.double().reshape(len(targets), -1)
        return errors.square().mean(dim=-1)

    def _judge(self, judged: list[tuple[Tensor, SequenceSplit]]) -> None:
        errors = [np.abs(outputs.squeeze(-1).numpy() - split.targets) for outputs, split in judged]
        self.residuals_ = np.sort(np.concatenate(errors), axis=0).tolist() if errors else []


def _units(y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean and standard deviation of targets (n,) or (n, m); where they are constant, that value and 0."""
    is_constant = (y == y[0]).all(axis=0)
    mean, scale = y.mean(axis=0), y.std(axis=0)
    unit = np.abs(y - mean).max(axis=0)
    if np.any(unit < _SMALLEST):
        exact = unit * ((y - mean) / np.where(unit > 0, unit, 1.0)).std(axis=0)
        scale = np.where(unit < _SMALLEST, np.where(exact > 0, exact, unit), scale)
    return np.where(is_constant, y[0], mean), np.where(is_constant, 0.0, scale)


def _standardized(targets: np.ndarray, mean: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """Targets in units of the training targets, float32; InputError where one has no such number."""
    with np.errstate(over="ignore"):
        values = ((targets - mean) / np.where(scale > 0, scale, 1.0)).astype(np.float32)
    if not np.isfinite(values).all():
        row = int(np.argwhere(~np.isfinite(values))[0][0])
        raise InputError(
            f"the target {targets[row]} of row {row} is too far from the training targets (mean {mean}, "
            f"standard deviation {scale}): float32 is used"
        )
    return values
