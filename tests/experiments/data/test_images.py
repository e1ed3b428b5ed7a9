"""Image sets from their files: what is read, and what is refused in one line that names it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from kernel_attention.experiments.data.images import load_images

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
