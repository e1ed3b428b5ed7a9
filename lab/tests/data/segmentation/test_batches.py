"""Crops keep image and labels together and depend on (seed, epoch, case) alone; whole images are in order."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_attention_lab.data.segmentation.batches import make_crop_loader, make_whole_loader, random_crop
from kernel_attention_lab.data.segmentation.sets import VOID, SegmentationSplit

FILL = (7, 8, 9)


def ramp(size=(60, 200)):
    """An image whose red channel is the column and whose green channel is the row; labels are the column."""
    rows, columns = np.indices(size)
    image = np.stack([columns, rows, np.full(size, 77)], axis=-1).astype(np.uint8)
    return image, columns.astype(np.uint8)


def split_of_sizes(sizes):
    images = [np.full((*size, 3), index, dtype=np.uint8) for index, size in enumerate(sizes)]
    return SegmentationSplit(images, [image[:, :, 0] for image in images])


@pytest.mark.parametrize("seed", range(40))
def test_a_crop_shows_the_same_place_in_image_and_labels(seed):
    """Interpolation keeps a ramp; the nearest label is half a pixel away at most, and rounding adds half."""
    size = (50, 90)
    image, labels = random_crop(*ramp(), size, FILL, np.random.default_rng(seed))
    assert image.shape == (*size, 3)
    assert labels.shape == size
    inside = labels != VOID
    np.testing.assert_array_equal(image[~inside], np.broadcast_to(FILL, image[~inside].shape))
    columns, rows = image[..., 0].astype(int), image[..., 1].astype(int)
    assert np.abs(columns - labels)[inside].max() <= 1
    assert (np.diff(rows, axis=0)[inside[1:] & inside[:-1]] >= 0).all(), "never upside down"
    height, width = inside.any(axis=1).sum(), inside.any(axis=0).sum()
    assert inside.sum() == height * width
    scale = (width - 1) / max(int(np.ptp(columns[inside])), 1)
    assert 0.5 * 0.95 <= scale <= 2 * 1.05


def test_scales_places_and_mirror_images_are_all_drawn():
    scales, firsts, mirrored = [], set(), 0
    for seed in range(200):
        image, _ = random_crop(*ramp(), (30, 60), FILL, np.random.default_rng(seed))
        columns, rows = image[..., 0].astype(float), image[..., 1].astype(float)
        mirrored += columns[5, -1] < columns[5, 0]
        firsts.add((columns[0].min(), rows[0, 0]))
        scales.append(59 / np.ptp(columns[0]))
    assert 0.35 * 200 < mirrored < 0.65 * 200  # 4 deviations of 200 throws
    assert min(scales) < 0.65
    assert max(scales) > 1.8
    assert len(firsts) > 150


def crops(loader):
    return [(batch.x.numpy().tobytes(), batch.target.numpy().tobytes()) for batch in loader]


def test_crops_depend_on_seed_and_epoch_alone():
    split = SegmentationSplit(*zip(*(ramp((20 + index, 30)) for index in range(7)), strict=True))
    loader = make_crop_loader(split, (16, 24), 3, fill=FILL, seed=4)
    first = crops(loader)
    assert crops(loader) == first
    assert [len(part) for part, _ in first] == [3 * 3 * 16 * 24, 3 * 3 * 16 * 24, 3 * 16 * 24]
    loader.sampler.set_epoch(1)
    second = crops(loader)
    assert second != first
    loader.sampler.skip(2, 3)
    assert crops(loader) == second[2:]
    assert crops(make_crop_loader(split, (16, 24), 3, fill=FILL, seed=5)) != first
    assert crops(make_crop_loader(split, (16, 24), 3, fill=FILL, seed=4, num_workers=1)) == first


def test_a_batch_gives_the_model_floats_between_0_and_1():
    batch = next(iter(make_crop_loader(split_of_sizes([(9, 9)] * 3), (4, 5), 2)))
    (pixels,) = batch.arguments
    assert pixels.shape == (2, 3, 4, 5)
    np.testing.assert_array_equal(pixels * 255, batch.x)


def test_whole_images_come_in_order_and_share_batches_with_their_like():
    sizes = [(4, 5)] * 5 + [(6, 5)] * 2 + [(4, 5)]
    batches = list(make_whole_loader(split_of_sizes(sizes), 2))
    assert [tuple(batch.x.shape) for batch in batches] == [
        (2, 3, 4, 5), (2, 3, 4, 5), (1, 3, 4, 5), (2, 3, 6, 5), (1, 3, 4, 5),
    ]  # fmt: skip
    assert [int(label[0, 0]) for batch in batches for label in batch.target] == list(range(8))
    assert all((batch.x[:, 0] == batch.target).all() for batch in batches)
