"""An attack's view of a model: pixels and true labels, or normalised inputs and the model's own classes.

The kernel-PCA paper's released code attacks inputs that are normalised with ImageNet's statistics. It clips
nothing, and leads away from the class that the model gives the clean image. Its eps is a radius in standard
deviations, about a quarter of the same number in pixels. An image that the model has wrong is led away from
the wrong class, perhaps to the right one. Accuracies of the two protocols do not compare.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.robustness.gradient_attacks import CarliniWagner
from kernel_attention_lab.robustness.image_attack import (
    PIXELS,
    Bounds,
    ImageAttack,
    attackable,
)

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


class Target(NamedTuple):
    """A model, its inputs and the classes to lead away from, as a protocol gives them to an attack."""

    model: nn.Module
    inputs: Tensor
    labels: Tensor


class AttackProtocol(ABC):
    """The conditions of an attack. ``PROTOCOLS`` is the table of them."""

    name: ClassVar[str]

    @abstractmethod
    def target(self, model: nn.Module, images: Tensor, labels: Tensor, attack: ImageAttack) -> Target:
        """The attack's inputs.

        Args:
            model: (B, C, H, W) with values in [0, 1] -> logits.
            images: (n, C, H, W) in [0, 1].
            labels: (n,), the true classes.
            attack: the attack to come.
        """

    @abstractmethod
    def bounds(self, attack: ImageAttack) -> Bounds:
        """The range that the attack clips its images to."""


class PixelProtocol(AttackProtocol):
    """Pixels in [0, 1], the normalisation inside the model, true labels."""

    name = "pixel"

    def target(self, model: nn.Module, images: Tensor, labels: Tensor, attack: ImageAttack) -> Target:
        """The model, the images and the true classes themselves."""
        return Target(model, images, labels)

    def bounds(self, attack: ImageAttack) -> Bounds:
        """Those of a pixel."""
        return PIXELS


class PaperProtocol(AttackProtocol):
    """The released kernel-PCA code: normalised inputs without clipping, the model's own classes as labels.

    Carlini-Wagner alone clips, to [0, 1] as if the inputs were pixels, and so changes them before it begins.
    """

    name = "paper"

    def target(self, model: nn.Module, images: Tensor, labels: Tensor, attack: ImageAttack) -> Target:
        """The model behind ``NormalizedInputs``, the normalised images, and the model's classes of them."""
        if images.size(1) != len(IMAGENET_MEAN):
            raise InputError(f"protocol paper needs images with 3 channels, these have {images.size(1)}")
        wrapped = NormalizedInputs(model)
        inputs = wrapped.normalized(images).clamp(*self.bounds(attack))
        with attackable(wrapped), torch.no_grad():
            classes = torch.cat([wrapped(part).argmax(dim=1) for part in inputs.split(64)])
        return Target(wrapped, inputs, classes)

    def bounds(self, attack: ImageAttack) -> Bounds:
        """None; [0, 1] for Carlini-Wagner."""
        return PIXELS if isinstance(attack, CarliniWagner) else (-math.inf, math.inf)


class NormalizedInputs(nn.Module):
    """A classifier of pixels as one of inputs normalised with ImageNet's mean and standard deviation."""

    mean: Tensor
    std: Tensor

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN)[:, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD)[:, None, None], persistent=False)

    def normalized(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W) in [0, 1] as the inputs of this model."""
        return (images - self.mean.to(images)) / self.std.to(images)

    def forward(self, inputs: Tensor) -> Tensor:
        """The model's logits for normalised inputs (B, 3, H, W)."""
        return self.model(inputs * self.std.to(inputs) + self.mean.to(inputs))


PROTOCOLS: dict[str, AttackProtocol] = {
    protocol.name: protocol for protocol in (PixelProtocol(), PaperProtocol())
}


def find_protocol(name: str) -> AttackProtocol:
    """A protocol by its name; InputError for an unknown one."""
    if name not in PROTOCOLS:
        raise unknown("protocol", name, PROTOCOLS)
    return PROTOCOLS[name]
