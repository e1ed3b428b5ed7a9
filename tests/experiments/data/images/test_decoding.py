"""What becomes of an image file: RGB, upright, of the size that was asked for."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from experiments.data.images.image_data import encoded, square
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention.experiments.data.images import decoding as image_decoding
from kernel_attention.experiments.data.images.decoding import decode_image, decode_images

RAMP = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5


def test_an_rgb_image_is_its_pixels():
    assert np.array_equal(decode_image(encoded(RAMP), "a"), RAMP)
    assert np.array_equal(decode_image(RAMP, "a"), RAMP)


def test_gray_has_three_equal_channels():
    gray = RAMP[..., 0]
    assert np.array_equal(decode_image(encoded(gray), "a"), np.repeat(gray[..., None], 3, axis=-1))
    one_bit = Image.fromarray(gray > 100)
    assert np.array_equal(decode_image(encoded(one_bit), "a")[..., 1], np.where(gray > 100, 255, 0))


def test_alpha_is_dropped():
    clear = np.dstack([RAMP, np.zeros((4, 4), np.uint8)])
    assert np.array_equal(decode_image(encoded(clear), "a"), RAMP)
    gray = np.dstack([RAMP[..., 0], np.zeros((4, 4), np.uint8)])
    assert np.array_equal(decode_image(encoded(Image.fromarray(gray, "LA")), "a")[..., 2], RAMP[..., 0])


@pytest.mark.parametrize("options", [{}, {"transparency": 1}, {"transparency": bytes(range(16))}])
def test_a_palette_is_looked_up(options):
    indices = np.arange(16, dtype=np.uint8).reshape(4, 4)
    image = Image.fromarray(indices, "P")
    image.putpalette(RAMP.reshape(-1).tolist())
    assert np.array_equal(decode_image(encoded(image, **options), "a"), RAMP)


def test_cmyk_is_converted():
    inks = np.zeros((4, 4, 4), np.uint8)
    inks[..., 0], inks[2:, :, 3] = 255, 255  # cyan, with black below
    pixels = decode_image(encoded(Image.fromarray(inks, "CMYK"), "TIFF"), "a")
    assert np.array_equal(pixels[:2], np.broadcast_to([0, 255, 255], (2, 4, 3)))
    assert not pixels[2:].any()


def test_of_16_bits_the_upper_8_are_kept():
    deep = (np.arange(16, dtype=np.uint16) * 4369).reshape(4, 4)  # from 0 to 65,535
    for kind in ("PNG", "TIFF"):
        assert np.array_equal(decode_image(encoded(Image.fromarray(deep), kind), "a")[..., 0], deep >> 8)


def test_floating_point_pixels_are_refused():
    with pytest.raises(InputError, match=r"cat\.tif: has floating-point values"):
        decode_image(encoded(Image.fromarray(RAMP[..., 0].astype(np.float32)), "TIFF"), "cat.tif")


@pytest.mark.parametrize(
    ("orientation", "upright"),
    [
        (1, lambda image: image), (2, np.fliplr), (3, lambda image: np.rot90(image, 2)), (4, np.flipud),
        (6, lambda image: np.rot90(image, -1)), (8, np.rot90),
    ],
)  # fmt: skip
def test_an_image_is_turned_as_its_orientation_says(orientation, upright):
    exif = Image.Exif()
    exif[0x0112] = orientation
    wide = np.arange(6 * 3, dtype=np.uint8).reshape(2, 3, 3)
    assert np.array_equal(decode_image(encoded(wide, exif=exif), "a"), upright(wide))


@pytest.mark.parametrize(("height", "width"), [(8, 24), (24, 8), (9, 30), (5, 7), (4, 4), (3, 3)])
def test_the_middle_of_any_size_is_cut_out(height, width):
    """A ramp from left to right, or from top to bottom, has its middle value in the middle of the cut."""
    side = max(height, width)
    ramp = np.linspace(0, 255, side).round().astype(np.uint8)
    pixels = (
        np.broadcast_to(ramp, (height, width))
        if width > height
        else np.broadcast_to(ramp[:height, None], (height, width))
    )
    cut = decode_image(encoded(np.ascontiguousarray(pixels)), "a", image_size=4)
    assert cut.shape == (4, 4, 3)
    # Half a pixel of the source, after resizing by the short side, is the error of an odd margin.
    assert abs(float(cut.mean()) - float(pixels.mean())) <= 255 / (side - 1) * min(height, width) / 4


def test_a_square_of_the_right_size_keeps_its_pixels():
    assert np.array_equal(decode_image(encoded(RAMP), "a", image_size=4), RAMP)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF"])
def test_a_damaged_image_is_named_in_one_line(kind):
    whole = encoded(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8), kind)
    for content in (whole[: len(whole) // 2], whole[:10], b"", b"no image at all"):
        with pytest.raises(InputError, match=r"cat/7: not readable as an image") as error:
            decode_image(content, "cat/7")
        assert "\n" not in str(error.value)
        assert "BytesIO" not in str(error.value)


@pytest.mark.parametrize("limit", [10, 30])
def test_an_image_of_too_many_pixels_is_refused(monkeypatch, limit):
    """Pillow warns above its limit and raises above twice the limit."""
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", limit)
    with pytest.raises(InputError, match="cat: has too many pixels"):
        decode_image(encoded(np.zeros((6, 6, 3), np.uint8)), "cat")


def files(count=600):
    return [(f"{number}.png", square(number % 256)) for number in range(count)]


def test_processes_decode_the_same_in_the_same_order(monkeypatch):
    here = list(decode_images(files(), "set", image_size=3, workers=1))
    assert [path for path, _ in here] == [path for path, _ in files()]
    assert [int(pixels[0, 0, 0]) for _, pixels in here] == [number % 256 for number in range(600)]
    monkeypatch.setattr(image_decoding, "_PATIENCE", 0)
    apart = list(decode_images(files(), "set", image_size=3, workers=2))
    assert [path for path, _ in apart] == [path for path, _ in here]
    assert all(np.array_equal(one, other) for (_, one), (_, other) in zip(here, apart, strict=True))
    bad = [*files(), ("bad.png", b"no image")]
    with pytest.raises(InputError, match=r"set: bad\.png: not readable as an image"):
        list(decode_images(bad, "set", workers=2))


def test_files_are_read_as_they_are_decoded(monkeypatch):
    """ImageNet fits in no memory, before or after decoding."""
    monkeypatch.setattr(image_decoding, "_PATIENCE", 1e9)
    read = 0

    def counted():
        nonlocal read
        for file in files(2000):
            read += 1
            yield file

    decoded = decode_images(counted(), "set", workers=1)
    next(decoded)
    assert read <= image_decoding._BATCH_FILES


def test_a_process_that_ends_before_its_time_is_told(monkeypatch):
    """As where the system kills it for its memory."""
    monkeypatch.setattr(image_decoding, "_PATIENCE", 0)
    monkeypatch.setattr(image_decoding, "process_pool", _Ending)
    with pytest.raises(RuntimeError, match="set: a process that decodes its images has ended"):
        list(decode_images(files(), "set", workers=2))


class _Ending(ProcessPoolExecutor):
    """Its processes end at their first task."""

    def submit(self, function, /, *arguments):
        return super().submit(os._exit, 1)
