"""The figures of detection are their definitions, and the scores are the model's confidence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.experiments.robustness import detection_figures, out_of_distribution_scores


def by_definition(inside, outside):
    """Average precision, the chance that an outsider scores higher, false positives at 95 % recall."""
    everything = np.concatenate([inside, outside])
    found, precision, false = [], [], []
    for threshold in sorted(set(everything), reverse=True):
        found.append((outside >= threshold).mean())
        precision.append((outside >= threshold).sum() / (everything >= threshold).sum())
        false.append((inside >= threshold).mean())
    steps = np.diff([0.0, *found])
    order = outside[:, None] - inside[None]
    return {
        "aupr": float((steps * precision).sum()),
        "auroc": float((order > 0).mean() + (order == 0).mean() / 2),
        "fpr95": next(rate for rate, recall in zip(false, found, strict=True) if recall >= 0.95),
        "aupr_of_chance": len(outside) / len(everything),
    }


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("sizes", [(40, 60), (90, 11)])
def test_the_figures_are_their_definitions(sizes, ties):
    generator = np.random.default_rng(0)
    inside, outside = generator.normal(0, 1, sizes[0]), generator.normal(1, 1, sizes[1])
    if ties:
        inside, outside = inside.round(), outside.round()
    # Sums of at most 101 fractions with rounding errors of 2^-53 each.
    expected = pytest.approx(by_definition(inside, outside), abs=101 * 2**-53)
    assert detection_figures(inside, outside) == expected


def test_a_score_that_separates_and_one_that_tells_nothing():
    perfect = detection_figures(np.array([0.1, 0.2, 0.3]), np.array([0.4, 0.5]))
    assert (perfect["aupr"], perfect["auroc"], perfect["fpr95"]) == (1, 1, 0)
    constant = detection_figures(np.zeros(30), np.zeros(10))
    assert (constant["aupr"], constant["auroc"], constant["fpr95"]) == (0.25, 0.5, 1)
    assert constant["aupr"] == constant["aupr_of_chance"]


def test_the_scores_are_negative_confidences(photos, classifier):
    inside, outside = photos[:4], 255 - photos
    record = out_of_distribution_scores(classifier, inside, outside, classes=[8, 0, 3], batch_size=4)
    classifier.eval()

    def scores(images):
        with torch.no_grad():
            logits = classifier(torch.from_numpy(images).permute(0, 3, 1, 2) / 255)[:, [8, 0, 3]]
        return (-logits.double().softmax(1).max(1).values).numpy()

    assert record == detection_figures(scores(inside), scores(outside)) | {"in_cases": 4, "out_cases": 6}
    assert record == json.loads(json.dumps(record))


@pytest.mark.parametrize("images", [np.zeros((0, 32, 32, 3), np.uint8), np.zeros((2, 32, 32, 3))])
def test_images_that_are_none(images, photos, classifier):
    with pytest.raises(InputError, match=r"images must be \(n, H, W, C\) uint8"):
        out_of_distribution_scores(classifier, photos, images)


def test_scores_that_are_not_finite():
    with pytest.raises(InputError, match=r"out_scores of shape \(2,\) must be"):
        detection_figures(np.zeros(3), np.array([0.0, np.nan]))
