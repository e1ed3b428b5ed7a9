"""Image sets from their files: what is read, and what is refused in one line that names it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kernel_attention.experiments.data.images import ImageSplit, load_images
from kernel_attention.experiments.data.token_sets import hold_out

SHARED = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[4] / "shared" / "data")


@pytest.fixture(scope="module")
def shared():
    if not (SHARED / "images" / "cifar10.tar.xz").is_file():
        pytest.skip(f"no images/cifar10.tar.xz in {SHARED} (set KERNEL_ATTENTION_DATA to the real data)")
    return SHARED


def test_the_real_cifar10_is_read_from_its_archive_once(shared, monkeypatch):
    data = load_images("cifar10", shared)
    assert data.train.images.shape == (50_000, 32, 32, 3)
    assert data.test.images.shape == (10_000, 32, 32, 3)
    assert data.validation is None
    assert np.array_equal(np.bincount(data.train.targets), [5000] * 10)
    assert np.array_equal(np.bincount(data.test.targets), [1000] * 10)
    assert data.class_names[0] == "airplane"
    assert data.class_names[9] == "truck"
    monkeypatch.setattr("kernel_attention.experiments.data.image_cache._build", None)
    again = load_images("cifar10", shared)
    assert np.array_equal(again.test.images, data.test.images)
    assert isinstance(again.train.images, np.memmap)
    assert not again.train.images.flags.writeable


def made_split(counts=(10, 20, 1), size=4):
    """Images that hold their own number, with so many cases of each class in turn."""
    targets = np.repeat(np.arange(len(counts)), counts)
    images = np.zeros((len(targets), size, size, 3), np.uint8)
    images += np.arange(len(targets), dtype=np.uint8)[:, None, None, None]
    return ImageSplit(images, targets)


def test_a_validation_part_is_held_out_of_every_class_by_the_seed():
    split = made_split()
    rest, held = hold_out(split, 0.2, seed=0)
    assert np.bincount(held.targets, minlength=3).tolist() == [2, 4, 0], "a class of one case stays"
    numbers = np.concatenate([rest.images[:, 0, 0, 0], held.images[:, 0, 0, 0]])
    assert sorted(numbers.tolist()) == list(range(31)), "each case is on one side"
    assert np.array_equal(split.targets[held.images[:, 0, 0, 0]], held.targets)
    assert np.array_equal(hold_out(split, 0.2, seed=0)[1].images, held.images)
    assert not np.array_equal(hold_out(split, 0.2, seed=1)[1].images, held.images)
