"""How well a classifier knows what it knows: calibration, and its errors told by their uncertainty.

Legend: n cases, k classes. The confidence of a case is its largest probability.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from kernel_attention.errors import InputError, require_positive
from kernel_attention_lab.robustness.out_of_distribution import detection_figures

BINS = 15  # Guo et al. 2017
_LEAST = 1e-12  # of a probability whose logarithm is taken


class Reliability(NamedTuple):
    """Bins of cases by confidence, lowest first; an empty bin has no mean and is left out.

    confidence: mean confidence of each bin.
    accuracy: share of right cases.
    cases: their number.
    """

    confidence: np.ndarray
    accuracy: np.ndarray
    cases: np.ndarray

    @property
    def error(self) -> float:
        """The mean of |accuracy - confidence| over the cases, the expected calibration error."""
        return float(np.abs(self.accuracy - self.confidence) @ self.cases / self.cases.sum())


def calibration_figures(
    probabilities: np.ndarray, targets: np.ndarray, uncertainty: np.ndarray | None = None, *, bins: int = BINS
) -> dict[str, float]:
    """Figures of predicted probabilities.

    Args:
        probabilities: (n, k), rows sum to 1.
        targets: (n,) classes.
        uncertainty: (n,), high where the case may be wrong, such as the entropy of ``predict_distribution``;
            None: one minus the confidence.
        bins: of both calibration errors.

    Returns:
        ``accuracy``; ``nll``, mean negative log-likelihood in nats, of probabilities of at least 1e-12;
        ``brier``, mean squared distance from the one-hot target (0 to 2); ``ece``, expected calibration error
        over bins of equal width (Guo et al. 2017); ``adaptive_ece``, over bins of equal size (Nguyen &
        O'Connor 2015); ``aurc``, area under the risk-coverage curve (Geifman et al. 2019); where there are
        right and wrong cases ``error_auroc`` and ``error_fpr95``, of wrong cases told by their uncertainty.

    Raises:
        InputError: for arrays that do not fit together, and rows that are no probabilities.
    """
    targets = _checked(probabilities, targets)
    is_right = probabilities.argmax(axis=1) == targets
    doubt = 1 - probabilities.max(axis=1) if uncertainty is None else np.asarray(uncertainty, dtype=float)
    if doubt.shape != targets.shape or not np.isfinite(doubt).all():
        raise InputError(f"uncertainty of shape {doubt.shape} must be {targets.shape}, finite")
    chosen = probabilities[np.arange(len(targets)), targets]
    figures = {
        "accuracy": float(is_right.mean()),
        "nll": float(-np.log(np.maximum(chosen, _LEAST)).mean()),
        "brier": float((np.square(probabilities).sum(axis=1) - 2 * chosen + 1).mean()),
        "ece": reliability(probabilities, targets, bins=bins).error,
        "adaptive_ece": reliability(probabilities, targets, bins=bins, equal_size=True).error,
        "aurc": float(risk_coverage(is_right, doubt).mean()),
    }
    if is_right.any() and not is_right.all():
        told = detection_figures(doubt[is_right], doubt[~is_right])
        figures |= {f"error_{name}": told[name] for name in ("auroc", "fpr95")}
    return figures


def reliability(
    probabilities: np.ndarray, targets: np.ndarray, *, bins: int = BINS, equal_size: bool = False
) -> Reliability:
    """The reliability diagram: bins of equal width in confidence, or of equal numbers of cases.

    Raises:
        InputError: as ``calibration_figures``.
    """
    targets = _checked(probabilities, targets)
    require_positive(bins=bins)
    confidence = probabilities.max(axis=1)
    is_right = (probabilities.argmax(axis=1) == targets).astype(float)
    if equal_size:
        order = np.argsort(confidence, kind="stable")
        place = np.empty(len(order), dtype=np.int64)
        place[order] = np.arange(len(order)) * bins // len(order)
    else:
        place = np.minimum((confidence * bins).astype(np.int64), bins - 1)
    cases = np.bincount(place, minlength=bins)
    held = cases > 0
    certain, right = (np.bincount(place, each, bins)[held] / cases[held] for each in (confidence, is_right))
    return Reliability(certain, right, cases[held])


def risk_coverage(is_right: np.ndarray, uncertainty: np.ndarray) -> np.ndarray:
    """The share of wrong cases among the 1, 2, .., n least uncertain ones, (n,).

    Equally uncertain cases share their errors, so that their order has no effect.
    """
    values, place, cases = np.unique(uncertainty, return_inverse=True, return_counts=True)
    wrong = np.bincount(place, ~np.asarray(is_right, dtype=bool), len(values)) / cases
    return np.cumsum(np.repeat(wrong, cases)) / np.arange(1, len(uncertainty) + 1)


def _checked(probabilities: Any, targets: Any) -> np.ndarray:
    """The targets as an array, of probabilities that fit them."""
    probabilities, targets = np.asarray(probabilities), np.asarray(targets)
    if probabilities.ndim != 2 or len(probabilities) == 0 or targets.shape != probabilities.shape[:1]:
        raise InputError(
            f"probabilities of shape {probabilities.shape} and targets of shape {targets.shape} must be "
            "(n, k) and (n,), n >= 1"
        )
    if not (np.abs(probabilities.sum(axis=1) - 1) < 1e-3).all() or probabilities.min() < 0:
        raise InputError("probabilities must be at least 0, and every row must sum to 1")
    if targets.min() < 0 or targets.max() >= probabilities.shape[1]:
        raise InputError(f"targets must be classes from 0 to {probabilities.shape[1] - 1}")
    return targets
