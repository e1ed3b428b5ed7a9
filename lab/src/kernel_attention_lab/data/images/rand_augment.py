"""RandAugment (Cubuk et al. 2020) in DeiT's form: two operations an image, magnitude 9 of 10 with noise.

Each image has its own operations and magnitudes. They are those that timm calls ``rand-m9-mstd0.5-inc1``: of
the operations whose effect could also fall with the magnitude, the form in which it grows.

Legend: n images of C channels and H x W pixels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.errors import unknown

OPERATIONS = (
    "auto_contrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize_add", "color",
    "contrast", "brightness", "sharpness", "shear_x", "shear_y", "translate_x", "translate_y",
)  # fmt: skip

_ENHANCEMENTS = ("color", "contrast", "brightness", "sharpness")
_LARGEST = {"rotate": 30.0, "shear_x": 0.3, "shear_y": 0.3, "translate_x": 0.45, "translate_y": 0.45}
_OPERATIONS_PER_IMAGE = 2
_PROBABILITY = 0.5  # that a chosen operation is applied
_MAGNITUDE, _DEVIATION, _LARGEST_MAGNITUDE = 9.0, 0.5, 10.0
_GRAY = (0.299, 0.587, 0.114)


def rand_augment(images: Tensor, fill: Tensor) -> Tensor:
    """Two random operations for every image. The random numbers are drawn on the CPU.

    Args:
        images: (n, 3, H, W) in [0, 1].
        fill: colour of what is moved in from outside, (3,).
    """
    images = images.clone()
    for _ in range(_OPERATIONS_PER_IMAGE):
        chosen = torch.randint(len(OPERATIONS), (len(images),))
        applied = torch.rand(len(images)) < _PROBABILITY
        magnitudes = (_MAGNITUDE + _DEVIATION * torch.randn(len(images))).clamp(0, _LARGEST_MAGNITUDE)
        signs = torch.randint(2, (len(images),)) * 2 - 1
        for number, operation in enumerate(OPERATIONS):
            places = torch.nonzero((chosen == number) & applied)[:, 0]
            if len(places):
                strength = strength_of(operation, magnitudes[places], signs[places])
                places = places.to(images.device)
                images[places] = apply_operation(operation, images[places], strength, fill)
    return images


def strength_of(operation: str, magnitudes: Tensor, signs: Tensor) -> Tensor:
    """An operation's magnitude in its own unit, (n,); the units are in ``apply_operation``.

    Args:
        operation: one of ``OPERATIONS``.
        magnitudes: (n,) in [0, 10].
        signs: (n,) of -1 and 1, for the operations that go either way.
    """
    level = magnitudes / _LARGEST_MAGNITUDE
    if operation in _LARGEST:
        return signs * level * _LARGEST[operation]
    if operation in _ENHANCEMENTS:
        return (1 + signs * 0.9 * level).clamp(min=0.1)
    if operation == "posterize":
        return 4 - (4 * level).floor()
    if operation == "solarize":
        return 256 - (256 * level).floor()
    if operation == "solarize_add":
        return (110 * level).floor()
    return level


def apply_operation(operation: str, images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """One operation on images (n, 3, H, W) in [0, 1] -> the same shape, in [0, 1].

    Args:
        operation: one of ``OPERATIONS``.
        images: (n, 3, H, W).
        strength: (n,): degrees of ``rotate``; tangent of ``shear_x`` and ``shear_y``; share of the side of
            ``translate_x`` and ``translate_y``; factor of ``color``, ``contrast``, ``brightness`` and
            ``sharpness`` (1 changes nothing); bits that ``posterize`` keeps; value of 0 to 256 from which
            ``solarize`` inverts; value that ``solarize_add`` adds below 128. The others take none.
        fill: colour of what is moved in from outside, (3,).

    Raises:
        InputError: for an unknown operation.
    """
    if operation not in OPERATIONS:
        raise unknown("operation", operation, OPERATIONS)
    strength = strength.to(images)
    if operation in _LARGEST:
        return _moved(operation, images, strength, fill.to(images))
    value = strength[:, None, None, None]
    if operation in _ENHANCEMENTS:
        return _enhanced(operation, images, value)
    if operation == "auto_contrast":
        low, high = images.amin(dim=(2, 3), keepdim=True), images.amax(dim=(2, 3), keepdim=True)
        return torch.where(high > low, (images - low) / (high - low).clamp(min=1e-6), images)
    if operation == "equalize":
        from kornia.enhance import equalize

        return equalize(images)
    if operation == "invert":
        return 1 - images
    levels = (255 * images).round()
    if operation == "posterize":
        step = 2 ** (8 - value)
        return (levels / step).floor() * step / 255
    if operation == "solarize":
        return torch.where(levels < value, images, 1 - images)
    return torch.where(levels < 128, images + value / 255, images).clamp(0, 1)


def _enhanced(operation: str, images: Tensor, factor: Tensor) -> Tensor:
    """The image on a line between a version without the property (factor 0) and itself (factor 1)."""
    if operation == "brightness":
        without = torch.zeros_like(images)
    elif operation == "sharpness":
        without = _smoothed(images)
    else:
        without = (images * images.new_tensor(_GRAY)[:, None, None]).sum(dim=1, keepdim=True)
        if operation == "contrast":
            without = without.mean(dim=(2, 3), keepdim=True)
    return (without + factor * (images - without)).clamp(0, 1)


def _smoothed(images: Tensor) -> Tensor:
    """Every pixel as a mean over its neighbours, in which it counts 5 times; the edge stays as it is."""
    weights = images.new_ones(3, 3)
    weights[1, 1] = 5
    kernel = (weights / weights.sum()).expand(images.size(1), 1, 3, 3)
    smoothed = images.clone()
    smoothed[..., 1:-1, 1:-1] = F.conv2d(images, kernel, groups=images.size(1))
    return smoothed


def _moved(operation: str, images: Tensor, strength: Tensor, fill: Tensor) -> Tensor:
    """Images under an affine map about their middle, with bicubic interpolation."""
    height, width = images.shape[-2:]
    # Rows of the map from places in the result to places in the image, in pixels from the middle.
    maps = torch.eye(2, 3, dtype=images.dtype, device=images.device).repeat(len(images), 1, 1)
    if operation == "rotate":
        angle = strength * (math.pi / 180)
        maps[:, 0, 0] = maps[:, 1, 1] = angle.cos()
        maps[:, 0, 1], maps[:, 1, 0] = -angle.sin(), angle.sin()
    elif operation == "shear_x":  # the first row of pixels stays where it is
        maps[:, 0, 1], maps[:, 0, 2] = strength, strength * height / 2
    elif operation == "shear_y":
        maps[:, 1, 0], maps[:, 1, 2] = strength, strength * width / 2
    elif operation == "translate_x":
        maps[:, 0, 2] = strength * width
    else:
        maps[:, 1, 2] = strength * height
    # affine_grid measures in half sides.
    half = images.new_tensor([width / 2, height / 2, 1.0])
    grid = F.affine_grid(maps * half / half[:2, None], list(images.shape), align_corners=False)
    colour = fill[:, None, None]
    moved = F.grid_sample(images - colour, grid, mode="bicubic", padding_mode="zeros", align_corners=False)
    return (moved + colour).clamp(0, 1)
