"""The common part of attacks on a classifier of images: its settings, its ball, its seeds and its result."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.fields import check_fields

Bounds = tuple[float, float]
PIXELS: Bounds = (0.0, 1.0)

_SEEDS = 2**31  # pyautoattack and torch take seeds below 2^63; a batch's seed is the attack's plus its place


@dataclass(frozen=True, kw_only=True)
class ImageAttack(ABC):
    """An attack with its options. Each attack is a subclass; ``ATTACKS`` is the table of them."""

    norm: ClassVar[Literal["linf", "l1", "l2"]]
    """The norm that the attack bounds or, where it takes no radius, minimises."""

    takes_eps: ClassVar[bool] = True
    """True where ``eps`` is the radius of the ball; False where the attack has its own radius or none."""

    minimises: ClassVar[bool] = False
    """True where the attack looks for the nearest image that succeeds, at any distance."""

    needs_gradient: ClassVar[bool] = True
    """True where the attack reads the gradient of the model."""

    def __post_init__(self) -> None:
        check_fields(self)

    takes_pixels: ClassVar[bool] = False
    """True where the attack clips to [0, 1] by itself, and so accepts no other inputs."""

    fewest_classes: ClassVar[int] = 2
    """The number of classes that the attack needs."""

    @abstractmethod
    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The attacked images, (B, C, H, W), of one batch; random draws come from torch's global generator.

        Args:
            model: in evaluation mode, with parameters that need no gradient; (B, C, H, W) -> logits.
            images: (B, C, H, W) within the bounds.
            labels: (B,), the classes to lead away from.
            eps: radius of the ball in the supremum norm, where the attack takes one.
            bounds: the range of an input, infinite where it is not clipped.
        """


class Attacked(NamedTuple):
    """The result of an attack.

    ``images`` (n, C, H, W) are the attacked images, ``predictions`` (n,) the model's classes of them, and
    ``success`` (n,) says where the class is not the label.
    """

    images: Tensor
    predictions: Tensor
    success: Tensor


def attack_images(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    attack: ImageAttack,
    *,
    eps: float = 1 / 255,
    bounds: Bounds = PIXELS,
    seed: int = 0,
    batch_size: int = 64,
    also_wrong: bool = False,
    on_progress: Callable[[int], object] | None = None,
) -> Attacked:
    """Attack a classifier of images, batch by batch.

    An image whose class is not its label from the start counts as a success, and is left as it is. The same
    seed and batch size give the same images. Neither torch's global generator nor the model is changed.

    Args:
        model: (B, C, H, W) -> logits (B, classes).
        images: (n, C, H, W) within the bounds.
        labels: (n,), the classes to lead away from.
        attack: one of ``ATTACKS`` with its options.
        eps: radius of the ball in the supremum norm; attacks with ``takes_eps`` False ignore it.
        bounds: the range of an input; ``(-inf, inf)`` does not clip.
        seed: of the random draws.
        batch_size: number of images attacked together.
        also_wrong: whether to attack the images too whose class is not their label, for use on another model.
        on_progress: called after every batch with the number of images done.

    Raises:
        InputError: for images outside the bounds or without labels, for an ``eps`` that is not positive, and
            for bounds or a number of classes that the attack does not take.
    """
    _check(images, labels, eps, bounds, seed, batch_size)
    require_bounds(attack, bounds)
    results: list[Tensor] = []
    predictions: list[Tensor] = []
    with attackable(model):
        for start in range(0, len(images), batch_size):
            batch, classes = images[start : start + batch_size], labels[start : start + batch_size]
            attacked = batch.clone()
            chosen = (_classes(model, batch) == classes) | also_wrong
            if chosen.any():
                with seeded((seed + start) % _SEEDS, batch.device):
                    found = attack.perturb(model, batch[chosen], classes[chosen], eps, bounds)
                attacked[chosen] = _within(found.detach(), batch[chosen], attack, eps, bounds)
            results.append(attacked)
            predictions.append(_classes(model, attacked))
            if on_progress is not None:
                on_progress(min(start + batch_size, len(images)))
    predicted = torch.cat(predictions)
    return Attacked(torch.cat(results), predicted, predicted != labels)


@contextlib.contextmanager
def attackable(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode, its parameters without gradients; both as before afterwards.

    An attack needs the gradient of the images alone. The parameters' gradients cost time, and libraries that
    call ``backward`` would add to them.
    """
    modes = {module: module.training for module in model.modules()}
    needed = {parameter: parameter.requires_grad for parameter in model.parameters()}
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, training in modes.items():
            module.training = training
        for parameter, needs in needed.items():
            parameter.requires_grad_(needs)


@contextlib.contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's generators within the block; they go on afterwards as if nothing was drawn."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield


def require_bounds(attack: ImageAttack, bounds: Bounds) -> None:
    """InputError for an attack on pixels where the inputs are no pixels."""
    if attack.takes_pixels and bounds != PIXELS:
        name = type(attack).__name__
        raise InputError(
            f"attack {name} takes pixels in [0, 1], not inputs within {bounds}: use protocol pixel"
        )


def require_classes(attack: ImageAttack, classes: int) -> None:
    """InputError for a model with fewer classes than the attack needs."""
    if classes < attack.fewest_classes:
        needed = f"{type(attack).__name__} needs at least {attack.fewest_classes} classes"
        raise InputError(f"attack {needed}, the model has {classes}")


def attacked_cases(count: int, cases: int, seed: int = 0) -> list[int]:
    """The test images that are attacked: the first of a permutation that depends on the seed alone.

    So all models of one data set are attacked on the same images, and a smaller number takes a part of them.

    Args:
        count: size of the split.
        cases: number of images; all of a smaller split.
        seed: of the permutation.
    """
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    return order[:cases].tolist()


@torch.no_grad()
def _classes(model: nn.Module, images: Tensor) -> Tensor:
    return model(images).argmax(dim=1)


def _within(found: Tensor, images: Tensor, attack: ImageAttack, eps: float, bounds: Bounds) -> Tensor:
    """The attacked images without what rounding put outside the ball or the bounds."""
    if attack.norm == "linf":
        found = found.clamp(images - eps, images + eps)
    return found.clamp(*bounds)


def _check(images: Tensor, labels: Tensor, eps: float, bounds: Bounds, seed: int, batch_size: int) -> None:
    if images.dim() != 4 or labels.shape != images.shape[:1] or not len(images):
        raise InputError(
            f"images {tuple(images.shape)} and labels {tuple(labels.shape)} must be (n, C, H, W) and (n,), "
            "with at least one image"
        )
    if not 0 < eps < float("inf"):
        raise InputError(f"eps={eps!r} must be a positive number")
    if batch_size < 1 or seed < 0:
        raise InputError(f"batch_size={batch_size} must be at least 1, seed={seed} at least 0")
    low, high = images.min().item(), images.max().item()
    if not (bounds[0] <= low and high <= bounds[1]):  # false for NaN too
        raise InputError(f"images hold values from {low:g} to {high:g}, outside the bounds {bounds}")
