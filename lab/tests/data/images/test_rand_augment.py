"""RandAugment: every operation is Pillow's, every magnitude is the one that DeiT's training gives it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageEnhance, ImageOps

from kernel_attention_lab.data.images.rand_augment import (
    OPERATIONS,
    apply_operation,
    rand_augment,
    strength_of,
)

FILL = (124, 116, 104)
_BICUBIC = {"resample": Image.Resampling.BICUBIC, "fillcolor": FILL}


def affine(image, *coefficients):
    return image.transform(image.size, Image.Transform.AFFINE, coefficients, **_BICUBIC)


def solarize_add(image, added):
    return image.point([min(255, grey + int(added)) if grey < 128 else grey for grey in range(256)] * 3)


PILLOW = {
    "auto_contrast": lambda image, _: ImageOps.autocontrast(image),
    "equalize": lambda image, _: ImageOps.equalize(image),
    "invert": lambda image, _: ImageOps.invert(image),
    "rotate": lambda image, degrees: image.rotate(degrees, **_BICUBIC),
    "posterize": lambda image, bits: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold: ImageOps.solarize(image, threshold),
    "solarize_add": solarize_add,
    "color": lambda image, factor: ImageEnhance.Color(image).enhance(factor),
    "contrast": lambda image, factor: ImageEnhance.Contrast(image).enhance(factor),
    "brightness": lambda image, factor: ImageEnhance.Brightness(image).enhance(factor),
    "sharpness": lambda image, factor: ImageEnhance.Sharpness(image).enhance(factor),
    "shear_x": lambda image, factor: affine(image, 1, factor, 0, 0, 1, 0),
    "shear_y": lambda image, factor: affine(image, 1, 0, 0, factor, 1, 0),
    "translate_x": lambda image, share: affine(image, 1, 0, share * image.width, 0, 1, 0),
    "translate_y": lambda image, share: affine(image, 1, 0, 0, 0, 1, share * image.height),
}
STRENGTHS = {
    "rotate": (27.0, -13.5), "posterize": (1, 3), "solarize": (26, 140), "solarize_add": (99, 40),
    "color": (1.81, 0.19), "contrast": (1.81, 0.19), "brightness": (1.81, 0.19), "sharpness": (1.81, 0.19),
    "shear_x": (0.27, -0.1), "shear_y": (0.27, -0.1), "translate_x": (0.405, -0.25),
    "translate_y": (0.4, -0.25),
}  # fmt: skip


_MOVES = ("rotate", "shear_x", "shear_y", "translate_x", "translate_y")


@pytest.fixture
def photographs() -> np.ndarray:
    """Two smooth images of 44 x 60 pixels without equal channels, (2, 44, 60, 3) uint8."""
    y, x = np.mgrid[:44, :60]
    waves = [
        100 + 70 * np.sin(x / 25 + phase) * np.cos(y / (20 + phase)) + 30 * phase for phase in (0, 1, 2, 3)
    ]
    return np.stack([np.stack(waves[:3], -1), np.stack(waves[1:], -1)]).clip(0, 255).astype(np.uint8)


def pillows(operation: str, pixels: np.ndarray, strength: float) -> np.ndarray:
    return np.asarray(PILLOW[operation](Image.fromarray(pixels), strength)).astype(float)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_is_pillows(operation, photographs):
    """Equal up to Pillow's rounding, and away from edges.

    Pillow rounds the version without colour or contrast (0.5, times 0.81) and cuts the result's fraction (1).
    Moved images are smooth, since the two libraries' bicubic kernels differ by some tenths of the slope. They
    are compared inside of a frame of three pixels, and where only the fill is left: at the edge Pillow cuts
    the kernel and torch does not.
    """
    if operation not in _MOVES:
        noise = np.random.default_rng(0).integers(-20, 20, photographs.shape)
        photographs = (photographs + noise).clip(0, 255).astype(np.uint8)
    strengths = torch.tensor(STRENGTHS.get(operation, (0.9, 0.8)), dtype=torch.float64)
    images = torch.from_numpy(photographs.transpose(0, 3, 1, 2)).double() / 255
    fill = torch.tensor(FILL, dtype=torch.float64) / 255
    result = 255 * apply_operation(operation, images, strengths, fill).numpy().transpose(0, 2, 3, 1)
    for own, pixels, strength in zip(result, photographs, strengths.tolist(), strict=True):
        expected = pillows(operation, pixels, strength)
        assert not np.array_equal(expected, pixels)
        if operation not in _MOVES:
            np.testing.assert_allclose(own, expected, atol=1.41)
            continue
        frame = np.pad(np.full((38, 54, 3), 255, np.uint8), ((3, 3), (3, 3), (0, 0)))
        inside = (pillows(operation, frame, strength) == 255).all(axis=-1)
        outside = (own == FILL).all(axis=-1)
        assert inside.mean() > 0.3
        assert outside.mean() > 0.01
        np.testing.assert_allclose(own[inside], expected[inside], atol=2.01)
        np.testing.assert_array_equal(expected[outside], own[outside])


def test_the_magnitudes_of_rand_m9_inc1():
    """Magnitude 9 of 10, and 10; the range of each operation is that of the paper's implementations."""
    nine, ten = (
        {
            operation: strength_of(operation, torch.tensor([m, m]), torch.tensor([1, -1])).tolist()
            for operation in STRENGTHS
        }
        for m in (9.0, 10.0)
    )
    assert nine == {
        name: pytest.approx(values)
        for name, values in {
            "rotate": [27, -27], "posterize": [1, 1], "solarize": [26, 26], "solarize_add": [99, 99],
            "color": [1.81, 0.19], "contrast": [1.81, 0.19], "brightness": [1.81, 0.19],
            "sharpness": [1.81, 0.19], "shear_x": [0.27, -0.27], "shear_y": [0.27, -0.27],
            "translate_x": [0.405, -0.405], "translate_y": [0.405, -0.405],
        }.items()
    }  # fmt: skip
    assert ten["posterize"] == [0, 0]
    assert ten["color"] == pytest.approx([1.9, 0.1])


def test_every_image_has_operations_of_its_own():
    """Twice one of 15 operations with probability 1/2: a quarter of the images stays, within 5 deviations."""
    torch.manual_seed(0)
    image = torch.rand(3, 12, 12)
    images = image.expand(2000, -1, -1, -1)
    result = rand_augment(images, torch.zeros(3))
    stays = (result == image).all(dim=(1, 2, 3)).double().mean()
    assert abs(stays - 0.25) < 5 * (0.25 * 0.75 / 2000) ** 0.5
    # 15 operations, most of them with a random sign and magnitude, alone or in pairs.
    assert len({tuple(one.flatten()[:20].tolist()) for one in result}) > 1000
    assert (images == image).all(), "the images themselves are not written to"


def test_magnitudes_have_the_noise_of_mstd05():
    """Rotations of many images: normal about 27 degrees with deviation 1.5, cut at 30 (m = 10)."""
    torch.manual_seed(0)
    magnitudes = []

    def record(operation, images, strength, fill):
        magnitudes.extend(strength.abs().tolist() if operation == "rotate" else ())
        return images

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kernel_attention_lab.data.images.rand_augment.apply_operation", record)
        rand_augment(torch.zeros(30_000, 1, 1, 1), torch.zeros(1))
    degrees = np.array(magnitudes)
    assert len(degrees) == pytest.approx(2000, abs=5 * 2000**0.5)
    below = degrees[degrees < 27]  # half of a normal distribution: mean |x| is sqrt(2 / pi) deviations
    assert len(below) == pytest.approx(len(degrees) / 2, abs=2.5 * len(degrees) ** 0.5)
    assert (27 - below).mean() == pytest.approx(1.5 * (2 / np.pi) ** 0.5, rel=5 * 0.76 / len(below) ** 0.5)
    assert degrees.max() <= 30.0001
