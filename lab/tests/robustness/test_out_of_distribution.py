"""The figures of detection are their definitions, and the scores are the model's confidence."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.packing import pack_levels
from kernel_attention_lab.robustness import (
    detection_figures,
    levels_of,
    out_of_distribution_scores,
    precision_recall_area,
    score_levels,
)


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

    known, unseen = scores(inside), scores(outside)
    expected = score_levels(known, unseen)
    levels = {"in": pack_levels(expected[0]), "out": pack_levels(expected[1])}
    cases = {"in_cases": 4, "out_cases": 6, "levels": levels}
    assert record == detection_figures(known, unseen) | cases
    assert [found.tolist() for found in levels_of(record)] == [found.tolist() for found in expected]
    assert levels_of({"aupr": 0.5}) is None
    assert record == json.loads(json.dumps(record))


def counts_of(levels):
    return np.bincount(levels, minlength=64).astype(float)


def test_levels_keep_the_order_and_the_area():
    generator = np.random.default_rng(0)
    inside, outside = generator.normal(0, 1, 5000), generator.normal(0.7, 1, 2000)
    known, unseen = score_levels(inside, outside)
    scores, levels = np.concatenate([inside, outside]), np.concatenate([known, unseen])
    assert (np.diff(levels[np.argsort(scores)]) >= 0).all()
    assert set(levels.tolist()) == set(range(64))
    area = precision_recall_area(counts_of(known), counts_of(unseen))
    assert area == pytest.approx(detection_figures(inside, outside)["aupr"], abs=1e-3), "as the page says"
    tied = score_levels(np.zeros(7), np.zeros(3))
    assert {level for of_set in tied for level in of_set.tolist()} == {63}


def test_the_area_is_that_of_levels_cut_into_thin_ones():
    """A level cut into m thin ones of equal shares: the sum by steps nears the area as 1 / m."""
    generator = np.random.default_rng(1)
    inside, outside = generator.integers(0, 9, (2, 64)).astype(float)
    inside[3] = outside[5] = inside[63] = inside[10] = outside[10] = 0
    area = precision_recall_area(inside, outside)

    def by_steps(parts):
        found, wrong = (np.repeat(each[::-1] / parts, parts) for each in (outside, inside))
        taken = np.cumsum(found + wrong)
        return (found * np.cumsum(found) / np.where(taken > 0, taken, 1)).sum() / found.sum()

    errors = [abs(by_steps(parts) - area) for parts in (100, 1000, 10000)]
    assert errors[2] < 1e-5
    assert errors[1] == pytest.approx(errors[0] / 10, rel=0.1)
    batch = precision_recall_area(np.stack([inside, 2 * inside]), np.stack([outside, 2 * outside]))
    np.testing.assert_allclose(batch, area, rtol=1e-14)


def test_areas_that_are_known():
    assert precision_recall_area(np.array([3.0, 0.0]), np.array([0.0, 2.0])) == 1
    assert precision_recall_area(np.array([3.0, 0.0]), np.array([2.0, 0.0])) == 0.4


@pytest.mark.parametrize("images", [np.zeros((0, 32, 32, 3), np.uint8), np.zeros((2, 32, 32, 3))])
def test_images_that_are_none(images, photos, classifier):
    with pytest.raises(InputError, match=r"images must be \(n, H, W, C\) uint8"):
        out_of_distribution_scores(classifier, photos, images)


def test_scores_that_are_not_finite():
    with pytest.raises(InputError, match=r"out_scores of shape \(2,\) must be"):
        detection_figures(np.zeros(3), np.array([0.0, np.nan]))
