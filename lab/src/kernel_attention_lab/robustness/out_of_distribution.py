"""Detection of images that are of none of the classes, as the released kernel-PCA code measures it.

The score of an image is the negative of its largest softmax probability (Hendrycks & Gimpel 2017,
arXiv:1610.02136), and images from elsewhere are the positive class. On ImageNet-O the logits are first masked
to the set's 200 classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention_lab.packing import LEVELS, pack_levels, unpack_levels
from kernel_attention_lab.robustness.pixel_logits import pixel_logits

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
        A record of JSON's types: the figures of ``detection_figures``, ``in_cases`` and ``out_cases``; and
        ``levels`` of both sets (``score_levels``, as ``statistics.pack_levels`` writes them).

    Raises:
        InputError: for images or classes that do not fit the model.
    """
    in_scores, out_scores = (
        _scores(pixel_logits(model, images, classes=classes, batch_size=batch_size))
        for images in (in_images, out_images)
    )
    cases = {"in_cases": len(in_images), "out_cases": len(out_images)}
    levels = zip(("in", "out"), score_levels(in_scores, out_scores), strict=True)
    texts = {"levels": {name: pack_levels(of_set) for name, of_set in levels}}
    return detection_figures(in_scores, out_scores) | cases | texts


def score_levels(in_scores: np.ndarray, out_scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The scores of both sets in 64 levels, which a record keeps for paired tests.

    A score with the share u of all scores above it has level 63 - floor(64 √u): the levels are narrow at
    the top, where precision changes fast, and one of the lowest holds 3 % of the images. Equal scores have
    equal levels.
    """
    descending = -np.sort(-np.concatenate([in_scores, out_scores]))
    above = [np.searchsorted(-descending, -scores) / len(descending) for scores in (in_scores, out_scores)]
    levels = [LEVELS - 1 - np.floor(LEVELS * np.sqrt(share)).astype(np.int64) for share in above]
    return levels[0], levels[1]


def levels_of(record: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """The levels in a record of ``out_of_distribution_scores``; None in one that was made without them."""
    texts = record.get("levels")
    if texts is None:
        return None
    found = [unpack_levels(texts[name], record[f"{name}_cases"]) for name in ("in", "out")]
    return found[0], found[1]


def precision_recall_area(in_counts: np.ndarray, out_counts: np.ndarray) -> np.ndarray:
    """Area under the precision-recall curve from the numbers of images at each level, (..., levels).

    Between two thresholds the curve is that of a constant ratio of found and wrongly found images, so the
    precision is no straight line (Davis & Goadrich 2006).
    """
    found, taken = out_counts[..., ::-1], (in_counts + out_counts)[..., ::-1]
    before, taken_before = np.cumsum(found, axis=-1) - found, np.cumsum(taken, axis=-1) - taken
    share = np.divide(found, taken, out=np.zeros(found.shape), where=taken > 0)
    # The mean of (before + found x) / (taken_before + taken x) over x from 0 to 1.
    grown = np.divide(taken, taken_before, out=np.zeros(found.shape), where=taken_before > 0)
    more = np.divide(before - taken_before * share, taken, out=np.zeros(found.shape), where=taken > 0)
    return (found * (share + more * np.log1p(grown))).sum(axis=-1) / found.sum(axis=-1)


def _scores(logits: Tensor) -> np.ndarray:
    """Negative largest softmax probability, in float64: float32 would tie confident images at 1."""
    return (-torch.softmax(logits.double(), dim=1).amax(dim=1)).numpy()
