"""Augmentation changes images as its papers say and draws from torch's generator alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention_lab.data.images.augmentation import Augmentation, mix

GRAY = (torch.full((3,), 0.5), torch.full((3,), 0.25))  # mean and deviation of the training images


@pytest.fixture
def images() -> torch.Tensor:
    return torch.rand(37, 3, 16, 24)


@pytest.mark.parametrize("name", ["none", "crop_flip", "deit"])
@pytest.mark.parametrize("erasing", [0.0, 0.5])
def test_same_numbers_for_the_same_state_of_the_generator(images, name, erasing):
    augment = Augmentation(name, (16, 24), erasing)
    torch.manual_seed(3)
    first = augment(images, *GRAY)
    torch.manual_seed(3)
    assert torch.equal(augment(images, *GRAY), first)
    assert first.shape == images.shape
    assert erasing or 0 <= first.min() <= first.max() <= 1
    assert torch.equal(first, images) == (name == "none" and not erasing)


def test_crop_flip_moves_and_mirrors():
    """Every result is the image moved by at most an eighth of its side, zeros at the edge, and mirrored."""
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
    for result in augment(image.expand(200, -1, -1, -1), *GRAY):
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


def test_erasing_touches_the_stated_share_of_images_and_area():
    images = torch.ones(400, 3, 32, 32)
    result = Augmentation("none", (32, 32), 0.25)(images, *GRAY)
    erased = result != 1
    share = erased[:, 0].double().mean(dim=(1, 2))
    touched = share > 0
    assert abs(touched.double().mean() - 0.25) < 5 * (0.25 * 0.75 / 400) ** 0.5
    assert share[touched].min() > 0.01
    assert share[touched].max() < 0.4


def test_the_noise_of_erasing_is_standard_after_standardisation():
    """DeiT erases with normal noise after standardisation. Five standard errors of mean and deviation."""
    mean, std = torch.tensor([0.2, 0.5, 0.7]), torch.tensor([0.1, 0.2, 0.3])
    images = torch.full((300, 3, 32, 32), 1.0)
    result = Augmentation("none", (32, 32), 1.0)(images, mean, std)
    erased = (result != 1).all(dim=1)
    noise = ((result - mean[:, None, None]) / std[:, None, None]).transpose(0, 1)[:, erased].double()
    count = noise.size(1)
    assert count > 20_000
    assert (noise.mean(dim=1).abs() < 5 / count**0.5).all()
    assert ((noise.std(dim=1) - 1).abs() < 5 / (2 * count) ** 0.5).all()


@pytest.mark.parametrize("name", ["none", "crop_flip", "deit"])
def test_larger_images_are_cropped(name):
    images = torch.rand(11, 3, 20, 30)
    torch.manual_seed(0)
    result = Augmentation(name, (16, 24))(images, *GRAY)
    assert result.shape == (11, 3, 16, 24)
    assert torch.equal(result, images[..., 2:18, 3:27]) == (name == "none")


def test_both_mixtures_at_even_odds(images):
    """With both switched on, about half of the batches are cut: 200 draws, five standard deviations."""
    target = torch.arange(37)
    cuts = 0
    for _ in range(200):
        mixed, _ = mix(images, target, 37, 0.8, 1.0)
        cuts += bool(((mixed[1] == images[1]) | (mixed[1] == images[-2])).all())
    assert abs(cuts - 100) < 5 * 200**0.5 / 2
