"""What becomes of an image file: RGB, upright, of the size that was asked for."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from data.images.image_data import encoded, square
from PIL import Image

from kernel_attention.errors import InputError
from kernel_attention_lab.data.images import decoding as image_decoding
from kernel_attention_lab.data.images.decoding import decode_image, decode_images
from kernel_attention_lab.data.segmentation.label_maps import classes_of, decode_labels

RAMP = np.arange(48, dtype=np.uint8).reshape(4, 4, 3) * 5
READERS = (
    lambda content: decode_image(content, "photo"),
    lambda content: decode_labels(content, "photo", classes_of(None)),
)


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
    apart, bad = [], [*files(1024), ("bad.png", b"no image")]
    with pytest.raises(InputError, match=r"set: bad\.png: not readable as an image"):
        apart.extend(decode_images(bad, "set", image_size=3, workers=2))
    assert len(apart) == 1024, "all batches before that of the bad file"
    for (path, pixels), (expected, there) in zip(here, apart, strict=False):
        assert path == expected
        assert np.array_equal(pixels, there)


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


@pytest.mark.parametrize("read", READERS)
def test_only_the_accepted_formats_are_opened_whatever_the_name(read, monkeypatch):
    """Pillow runs Ghostscript on PostScript, and other formats have decoders of their own."""
    Image.init()
    small = np.zeros((8, 8), np.uint8)
    wanted = {"BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"}
    for kind in sorted(wanted - {"JPEG", "WEBP"}):
        assert read(encoded(small, kind)).shape[:2] == (8, 8)
    opened = []
    for kind in set(Image.OPEN) - wanted:
        accept = Image.OPEN[kind][1]
        monkeypatch.setitem(Image.OPEN, kind, (lambda *a, kind=kind: opened.append(kind), accept))
    script = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n{} loop\n"
    for content in (script, *(encoded(small, kind) for kind in ("TGA", "ICO", "PDF"))):
        with pytest.raises(InputError, match=r"no image of a known format\); accepted: BMP, GIF, JPEG"):
            read(content)
    assert opened == []


@pytest.mark.parametrize("read", READERS)
def test_more_pixels_than_memory_allows_are_refused_before_they_are_decoded(read, monkeypatch):
    monkeypatch.setenv("KERNEL_ATTENTION_MEMORY_LIMIT", "0.001")
    with pytest.raises(InputError, match=r"photo: 1000 x 1000 pixels would take"):
        read(encoded(np.zeros((1000, 1000), np.uint8)))


@pytest.mark.parametrize("read", READERS)
def test_a_lack_of_memory_is_named(read, monkeypatch):
    def fail(*_, **__):
        raise MemoryError

    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", fail)
    with pytest.raises(InputError, match=r"photo: not readable as an image \(MemoryError\)"):
        read(encoded(np.zeros((8, 8), np.uint8)))


@pytest.mark.parametrize(("height", "width"), [(2, 90), (90, 2), (1, 4000), (31, 24), (3, 3)])
def test_the_middle_is_that_of_the_whole_resized(height, width):
    """Of a narrow one in the other order of the two directions, so each rounds once more; none is clipped."""
    draw = np.random.default_rng(0)
    pixels = draw.integers(90, 160, (height, width, 3), dtype=np.uint8)
    size = 16
    scale = size / min(height, width)
    shape = (max(round(width * scale), size), max(round(height * scale), size))
    whole = np.asarray(Image.fromarray(pixels).resize(shape, Image.Resampling.BICUBIC), dtype=int)
    top, left = (shape[1] - size) // 2, (shape[0] - size) // 2
    found = decode_image(encoded(pixels), "photo", size)
    assert np.abs(found - whole[top : top + size, left : left + size]).max() <= 2


def test_a_narrow_image_takes_the_memory_of_its_middle(monkeypatch):
    sizes = []
    resize = Image.Image.resize

    def measured(image, shape, *rest):
        sizes.append(shape[0] * shape[1])
        return resize(image, shape, *rest)

    monkeypatch.setattr(Image.Image, "resize", measured)
    assert decode_image(encoded(np.zeros((1, 100_000), np.uint8)), "photo", 64).shape == (64, 64, 3)
    assert sizes
    assert max(sizes) <= 64 * 64 * 8
