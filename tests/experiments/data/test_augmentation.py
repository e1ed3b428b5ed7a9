"""Augmentation changes images as its papers say, draws from torch's generator, and keeps their range."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.augmentation import Augmentation, mix


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(37, 3, 16, 24)


@pytest.mark.parametrize("name", ["none", "crop_flip", "deit"])
@pytest.mark.parametrize("erasing", [0.0, 0.5])
def test_same_numbers_for_the_same_state_of_the_generator(images, name, erasing):
    augment = Augmentation(name, (16, 24), erasing)
    torch.manual_seed(3)
    first = augment(images)
    torch.manual_seed(3)
    assert torch.equal(augment(images), first)
    assert first.shape == images.shape
    assert first.min() >= 0
    assert first.max() <= 1
    assert torch.equal(first, images) == (name == "none" and not erasing)


def test_crop_flip_moves_and_mirrors():
    """Every result is the image shifted by at most an eighth of its side, mirrored or not."""
    augment = Augmentation("crop_flip", (16, 24))
    image = torch.rand(3, 16, 24)
    framed = torch.nn.functional.pad(image, (3, 3, 2, 2))
    moved = {
        (top, left, mirrored): framed[:, top : top + 16, left : left + 24].flip(-1 if mirrored else ())
        for top in range(5)
        for left in range(7)
        for mirrored in (False, True)
    }
    found = set()
    for result in augment(image.expand(200, -1, -1, -1)):
        matches = [key for key, candidate in moved.items() if torch.allclose(result, candidate, atol=1e-6)]
        assert len(matches) == 1
        found.add(matches[0])
    assert len({(top, left) for top, left, _ in found}) > 25
    assert {mirrored for _, _, mirrored in found} == {False, True}


def test_mixup_is_one_convex_combination_of_the_batch_and_its_reverse(images):
    target = torch.randint(0, 5, (37,))
    mixed, targets = mix(images, target, 5, mixup=0.8, cutmix=0.0)
    kept = targets[0, target[0]].item() if target[0] != target[-1] else None
    if kept is not None:
        torch.testing.assert_close(mixed, kept * images + (1 - kept) * images.flip(0))
    torch.testing.assert_close(targets.sum(dim=1), torch.ones(37))


def test_cutmix_weighs_targets_by_area(images):
    """The share of an image's own pixels is the weight of its own class."""
    target = torch.arange(37)
    for seed in range(20):
        torch.manual_seed(seed)
        mixed, targets = mix(images, target, 37, mixup=0.0, cutmix=1.0)
        own = (mixed[0] == images[0]).all(dim=0)
        other = (mixed[0] == images[-1]).all(dim=0)
        assert (own | other).all()
        np.testing.assert_allclose(targets[0, 0].item(), own.double().mean().item(), rtol=1e-6)


def test_smoothed_targets_without_mixing(images):
    target = torch.arange(37) % 4
    mixed, targets = mix(images, target, 4, 0.0, 0.0, smoothing=0.1)
    assert torch.equal(mixed, images)
    np.testing.assert_allclose(targets[range(37), target], 0.9 + 0.1 / 4, rtol=1e-6)


def test_both_mixtures_at_even_odds(images):
    """With both switched on, about half of the batches are cut: 200 draws, five standard deviations."""
    target = torch.arange(37)
    cuts = 0
    for _ in range(200):
        mixed, _ = mix(images, target, 37, 0.8, 1.0)
        cuts += bool(((mixed[1] == images[1]) | (mixed[1] == images[-2])).all())
    assert abs(cuts - 100) < 5 * 200**0.5 / 2


def test_erasing_touches_the_stated_share_of_images_and_area():
    images = torch.ones(400, 3, 32, 32)  # the noise is below 1
    erased = Augmentation("none", (32, 32), 0.25)(images) < 1
    share = erased[:, 0].double().mean(dim=(1, 2))
    touched = share > 0
    assert abs(touched.double().mean() - 0.25) < 5 * (0.25 * 0.75 / 400) ** 0.5
    assert share[touched].min() > 0.01
    assert share[touched].max() < 0.4


def test_unknown_name():
    with pytest.raises(InputError, match="augmentation"):
        Augmentation("autoaugment", (8, 8))
