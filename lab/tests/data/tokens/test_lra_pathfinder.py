"""Pathfinder: a flood fill that jumps one pixel gets from disc to disc in the positive images only."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.data.tokens.lra_pathfinder import SMALL, generate_pathfinder, load_pathfinder


def connected(image):
    """Whether a fill from one disc reaches the other, stepping at most 2 pixels in each direction."""
    ink, discs = image > 0, np.argwhere(image == 255)
    reached = np.zeros_like(ink)
    reached[tuple(discs[0])] = True
    while True:
        padded = np.pad(reached, 2)
        windows = np.lib.stride_tricks.sliding_window_view(padded, (5, 5))
        grown = ink & windows.any(axis=(2, 3))
        if np.array_equal(grown, reached):
            return bool(reached[image == 255].all())
        reached = grown


@pytest.fixture(scope="module")
def images():
    return generate_pathfinder(150)


def test_positives_are_connected_and_negatives_are_not(images):
    found = [connected(image) for image in images[0]]
    assert found == images[1].astype(bool).tolist()
    assert 0.3 < images[1].mean() < 0.7


def test_every_image_has_two_discs_two_contours_and_five_distractors(images):
    for image in images[0]:
        assert (image == 255).sum() == 18, "two discs of radius 1.5"
        assert set(np.unique(image)) == {0, 191, 255}
        assert pieces(image > 0) == 7


def pieces(ink):
    """Groups of pixels that steps of at most 2 connect."""
    left, count = {tuple(place) for place in np.argwhere(ink)}, 0
    while left:
        count, edge = count + 1, [left.pop()]
        while edge:
            row, column = edge.pop()
            near = {(row + i, column + j) for i in range(-2, 3) for j in range(-2, 3)} & left
            left -= near
            edge += near
    return count


def test_a_seed_gives_the_same_images(images):
    again, labels = generate_pathfinder(20)
    assert np.array_equal(again, images[0][:20])
    assert np.array_equal(labels, images[1][:20])
    assert not np.array_equal(generate_pathfinder(1, seed=1)[0], again[:1])


def test_the_splits_come_back_from_the_cache(tmp_path):
    data = load_pathfinder(tmp_path, 12, 4)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [12, 4, 4]
    assert data.max_len == 1024
    assert np.array_equal(load_pathfinder(tmp_path, 12, 4).train.tokens, data.train.tokens)
    small = load_pathfinder(tmp_path, 12, 4, SMALL)
    assert (small.name, small.max_len) == ("pathfinder16", 256), "with a cache of their own"


def release(root, count=20):
    from PIL import Image

    folder = root / "pathfinder32" / "curv_contour_length_14"
    (folder / "imgs" / "0").mkdir(parents=True)
    (folder / "metadata").mkdir()
    lines = []
    for number in range(count):
        Image.fromarray(np.full((32, 32), number, np.uint8)).save(folder / f"imgs/0/sample_{number}.png")
        lines.append(f"imgs/0 sample_{number}.png {number} {number % 2} 1.0 14 2")
    (folder / "metadata" / "0.npy").write_text("\n".join(lines) + "\n")
    return folder


def test_the_folder_of_the_release_is_read(tmp_path):
    release(tmp_path)
    data = load_pathfinder(tmp_path)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [16, 2, 2]
    for split in (data.train, data.validation, data.test):
        for case, label in enumerate(split.targets):
            (pixels,) = split.case(case)
            assert pixels.shape == (1024,)
            assert pixels[0] % 2 == label, "image k has the gray value k and the label k mod 2"


def test_a_damaged_release_is_refused(tmp_path):
    folder = release(tmp_path)
    (folder / "imgs/0/sample_3.png").write_bytes(b"no image")
    with pytest.raises(InputError, match=r"sample_3\.png: not readable as an image"):
        load_pathfinder(tmp_path)
    (folder / "metadata/0.npy").write_text("imgs/0 sample_0.png\n")
    with pytest.raises(InputError, match="line 1 does not say"):
        load_pathfinder(tmp_path)
    (folder / "metadata/0.npy").write_bytes(b"\x93NUMPY\xff")
    with pytest.raises(InputError, match="cannot be read"):
        load_pathfinder(tmp_path)


def test_small_images():
    """The same contours in 256 pixels, with one distractor; and they come back under a name of their own."""
    images, labels = generate_pathfinder(60, specification=SMALL)
    assert images.shape == (60, 16, 16)
    assert [connected(image) for image in images] == labels.astype(bool).tolist()
    assert {pieces(image > 0) for image in images} == {3}
    assert 0.25 < labels.mean() < 0.75
