"""Batches of images: whose order, in which layout, and where a pass begins that a signal interrupted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention_lab.data.images.batches import RepeatedSampler, central, make_image_loader
from kernel_attention_lab.data.images.sets import ImageSplit


@pytest.fixture
def split() -> ImageSplit:
    images = np.random.default_rng(0).integers(0, 256, (23, 5, 7, 3), dtype=np.uint8)
    return ImageSplit(images, np.arange(23))


def test_batches_hold_the_images_channels_first(split):
    batches = list(make_image_loader(split, 10))
    assert [len(batch.x) for batch in batches] == [10, 10, 3]
    assert torch.cat([batch.target for batch in batches]).tolist() == list(range(23))
    x = torch.cat([batch.x for batch in batches])
    assert x.dtype == torch.uint8
    assert np.array_equal(x.permute(0, 2, 3, 1).numpy(), split.images)
    assert torch.equal(batches[0].pixels * 255, batches[0].x.float())


@pytest.mark.parametrize("size", [(5, 7), (3, 7), (2, 4), (1, 1)])
def test_the_middle_of_images_is_read_and_copies_nothing(split, size):
    top, left = (5 - size[0]) // 2, (7 - size[1]) // 2
    expected = split.images[:, top : top + size[0], left : left + size[1]]
    middle = central(split, size)
    assert np.array_equal(middle.images, expected)
    assert np.shares_memory(middle.images, split.images)
    (batch,) = make_image_loader(split, 23, size=size)
    assert np.array_equal(batch.x.permute(0, 2, 3, 1).numpy(), expected)


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_depends_on_seed_and_epoch_alone(split, workers):
    def orders(seed: int) -> list[list[int]]:
        loader = make_image_loader(split, 4, shuffle=True, seed=seed, num_workers=workers)
        found = []
        for epoch in (0, 1):
            loader.sampler.set_epoch(epoch)
            torch.rand(3)  # other draws do not change the order
            found.append([case for batch in loader for case in batch.target.tolist()])
        return found

    first = orders(3)
    assert first == orders(3)
    assert first[0] != first[1]
    assert first[0] != orders(4)[0]
    assert sorted(first[0]) == list(range(23))


@pytest.mark.parametrize("repeats", [1, 3])
def test_repeated_cases_stand_together(repeats):
    sampler = RepeatedSampler(23, repeats, seed=5)
    order = list(sampler)
    assert len(order) == len(sampler) == 23
    runs = [order[place : place + repeats] for place in range(0, 23, repeats)]
    assert all(len(set(run)) == 1 for run in runs)
    assert len({run[0] for run in runs}) == len(runs)


@pytest.mark.parametrize("repeats", [1, 3])
def test_a_resumed_pass_continues_after_the_batches_it_had(repeats):
    sampler = RepeatedSampler(23, repeats, seed=5)
    whole = list(sampler)
    sampler.skip(2, 4)
    assert list(sampler) == whole[8:]
    assert list(sampler) == whole
