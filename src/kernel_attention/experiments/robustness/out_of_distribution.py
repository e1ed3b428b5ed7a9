"""Detection of images that are of none of the classes, as the released kernel-PCA code measures it.

The score of an image is the negative of its largest softmax probability (Hendrycks & Gimpel 2017,
arXiv:1610.02136), and images from elsewhere are the positive class. On ImageNet-O the logits are first masked
to the set's 200 classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.experiments.robustness.pixel_logits import pixel_logits

RECALL = 0.95


def detection_figures(in_scores: np.ndarray, out_scores: np.ndarray) -> dict[str, float]:
    """How well a score tells images from elsewhere (positive, high) from images of the classes.

    Args:
        in_scores: (n,) scores of images of the classes.
        out_scores: (m,) scores of images from elsewhere.

    Returns:
        ``aupr``: area under the precision-recall curve as average precision; for scores that tell nothing it
        is ``aupr_of_chance``, the share of images from elsewhere, so values at other shares do not compare.
        ``auroc``: area under the receiver operating characteristic. ``fpr95``: the share of images of the
        classes that are taken for others at the highest threshold that finds 95 % of the others.

    Raises:
        InputError: for an empty set, or scores that are not finite.
    """
    from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

    for name, scores in (("in_scores", in_scores), ("out_scores", out_scores)):
        if scores.ndim != 1 or len(scores) == 0 or not np.isfinite(scores).all():
            raise InputError(f"{name} of shape {scores.shape} must be (n,), n >= 1, finite")
    is_out = np.repeat([0, 1], [len(in_scores), len(out_scores)])
    scores = np.concatenate([in_scores, out_scores])
    false_positives, found, _ = roc_curve(is_out, scores, drop_intermediate=False)
    return {
        "aupr": float(average_precision_score(is_out, scores)),
        "auroc": float(roc_auc_score(is_out, scores)),
        "fpr95": float(false_positives[np.argmax(found >= RECALL)]),
        "aupr_of_chance": len(out_scores) / len(scores),
    }


def out_of_distribution_scores(
    model: nn.Module,
    in_images: np.ndarray,
    out_images: np.ndarray,
    *,
    classes: Sequence[int] | None = None,
    batch_size: int = 256,
) -> dict[str, Any]:
    """Measure how well a classifier's confidence tells images from elsewhere.

    Args:
        model: (B, 3, H, W) in [0, 1] -> (B, outputs) logits.
        in_images: (n, H, W, 3) uint8 images of the classes.
        out_images: (m, H, W, 3) uint8 images from elsewhere, of the same size.
        classes: the outputs to which the logits are masked, for a set that has fewer classes than the model.
        batch_size: images at a time.

    Returns:
        A record of JSON's types: the figures of ``detection_figures``, ``in_cases`` and ``out_cases``.

    Raises:
        InputError: for images or classes that do not fit the model.
    """
    in_scores, out_scores = (
        _scores(pixel_logits(model, images, classes=classes, batch_size=batch_size))
        for images in (in_images, out_images)
    )
    cases = {"in_cases": len(in_images), "out_cases": len(out_images)}
    return detection_figures(in_scores, out_scores) | cases


def _scores(logits: Tensor) -> np.ndarray:
    """Negative largest softmax probability, in float64: float32 would tie confident images at 1."""
    return (-torch.softmax(logits.double(), dim=1).amax(dim=1)).numpy()
