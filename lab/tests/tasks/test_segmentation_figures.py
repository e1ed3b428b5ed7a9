"""Figures of label maps: scikit-learn's on the pixels with a class, and baselines by their definition."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, jaccard_score, recall_score
from torch.nn import functional as F

from kernel_attention_lab.data.segmentation.batches import make_whole_loader
from kernel_attention_lab.data.segmentation.sets import VOID, SegmentationSplit
from kernel_attention_lab.tasks.segmentation import (
    baseline_metrics,
    count_pixels,
    enlarged,
    overlap_metrics,
    pixel_loss,
    segmentation_metrics,
)

CLASSES = 5


def maps(seed, size=(7, 11), void=0.2, top=CLASSES):
    generator = np.random.default_rng(seed)
    labels = generator.integers(top, size=size).astype(np.uint8)
    labels[generator.random(size) < void] = VOID
    return labels


def test_the_figures_are_scikit_learns_without_void():
    truth, predicted = maps(0, (3, 7, 11)), maps(1, (3, 7, 11), void=0)
    counts = count_pixels(torch.from_numpy(predicted), torch.from_numpy(truth), CLASSES)
    known = truth != VOID
    pair = (truth[known], predicted[known])
    np.testing.assert_array_equal(counts, confusion_matrix(*pair, labels=range(CLASSES)))
    figures = overlap_metrics(counts)
    assert figures["mean_iou"] == pytest.approx(jaccard_score(*pair, average="macro"))
    assert figures["mean_accuracy"] == pytest.approx(recall_score(*pair, average="macro"))
    assert figures["pixel_accuracy"] == pytest.approx((pair[0] == pair[1]).mean())
    np.testing.assert_allclose(figures["class_iou"], jaccard_score(*pair, average=None))
    np.testing.assert_allclose(figures["class_accuracy"], recall_score(*pair, average=None))


def test_a_class_that_does_not_occur_is_left_out():
    """Class 0 occurs, class 1 is only predicted, class 2 neither."""
    figures = overlap_metrics(torch.tensor([[3, 1, 0], [0, 0, 0], [0, 0, 0]]))
    assert figures["class_accuracy"] == [0.75, None, None]
    assert figures["class_iou"] == [0.75, 0.0, None]
    assert (figures["mean_accuracy"], figures["mean_iou"]) == (0.75, 0.375)


def test_the_loss_is_the_mean_over_the_pixels_with_a_class():
    logits = torch.randn(2, CLASSES, 7, 11, dtype=torch.float64)
    target = torch.from_numpy(maps(2, (2, 7, 11)))
    loss, count = pixel_loss(logits, target)
    known = target != VOID
    expected = F.cross_entropy(logits.movedim(1, -1)[known], target[known].long())
    torch.testing.assert_close(loss, expected)
    assert count == int(known.sum())
    nothing, none = pixel_loss(logits, torch.full_like(target, VOID))
    assert (nothing.item(), none) == (0.0, 0), "a crop may show void alone"


class Table(torch.nn.Module):
    """A model whose logits are a function of each pixel's red."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(256, CLASSES))

    def forward(self, images):
        return self.table[(images[:, 0] * 255).round().long()].movedim(-1, 1)


def test_figures_do_not_depend_on_the_batches():
    """Also for label maps of several sizes, one of them twice that of its image."""
    torch.manual_seed(0)
    sizes, scales = [(4, 6), (4, 6), (5, 3), (4, 6)], [1, 1, 1, 2]
    generator = np.random.default_rng(0)
    images = [generator.integers(256, size=(*size, 3)).astype(np.uint8) for size in sizes]
    labels = [maps(i, (s[0] * k, s[1] * k)) for i, (s, k) in enumerate(zip(sizes, scales, strict=True))]
    split, model = SegmentationSplit(images, labels), Table()
    found = [segmentation_metrics(model, make_whole_loader(split, b), CLASSES, "32-true") for b in (1, 3)]
    assert found[0].pop("loss") == pytest.approx(found[1].pop("loss"), rel=1e-6)
    assert found[0] == found[1]
    counts = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for image, label in split:
        logits = model(torch.from_numpy(image).permute(2, 0, 1)[None] / 255)
        target = torch.from_numpy(label)[None]
        counts += count_pixels(enlarged(logits, target).argmax(dim=1), target, CLASSES)
    assert found[0]["confusion_matrix"] == counts.tolist()
    assert found[0]["cases"] == 4


def test_baselines_by_their_definition():
    train = [maps(seed, (4, 6), top=3) for seed in range(9)]
    test = [maps(seed, (4, 6)) for seed in range(20, 24)]
    train[0][0, 0] = 4  # a class that no other training pixel has
    for labels in train[1:]:
        labels[0, 0] = labels[3, 5] = VOID
    train[0][3, 5] = VOID  # a place without any class in training
    pixels = np.stack(train)
    constant = np.bincount(pixels[pixels != VOID]).argmax()
    majority = np.empty((4, 6), dtype=np.uint8)
    for place in np.ndindex(4, 6):
        here = pixels[(slice(None), *place)]
        here = here[here != VOID]
        majority[place] = np.bincount(here).argmax() if here.size else constant
    split = SegmentationSplit([None] * 9, train), SegmentationSplit([None] * 4, test)
    found = baseline_metrics(*split, CLASSES)
    truth = np.stack(test)
    known = truth != VOID
    for name, predicted in (("constant", np.full((4, 6), constant)), ("majority", majority)):
        pair = (truth[known], np.broadcast_to(predicted, truth.shape)[known])
        options = {"average": "macro", "labels": range(CLASSES), "zero_division": 0}
        assert found[f"{name}_pixel_accuracy"] == pytest.approx((pair[0] == pair[1]).mean())
        assert found[f"{name}_mean_accuracy"] == pytest.approx(recall_score(*pair, **options))
        assert found[f"{name}_mean_iou"] == pytest.approx(jaccard_score(*pair, **options))
    assert majority[0, 0] == 4


def test_places_of_images_of_several_sizes_are_relative():
    """The left half is class 0 and the right half class 1, whatever the size."""
    halves = [np.repeat([[0, 1]], width, axis=1).repeat(height, axis=0).astype(np.uint8)
              for height, width in ((3, 4), (8, 6), (5, 32))]  # fmt: skip
    split = SegmentationSplit([None] * 3, halves)
    assert baseline_metrics(split, split, 2)["majority_pixel_accuracy"] == 1.0
