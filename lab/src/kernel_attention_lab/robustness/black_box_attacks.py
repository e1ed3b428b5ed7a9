"""No attack, attacks without gradients (random noise, SPSA, Square), and AutoAttack, which ends in Square."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from kernel_attention.errors import note
from kernel_attention.fields import Count, Positive
from kernel_attention_lab.robustness.image_attack import Bounds, ImageAttack, require_classes


@dataclass(frozen=True, kw_only=True)
class Clean(ImageAttack):
    """No attack: the accuracy that the others are compared with."""

    norm: ClassVar[Literal["linf"]] = "linf"
    takes_eps: ClassVar[bool] = False
    needs_gradient: ClassVar[bool] = False

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The images themselves."""
        return images


@dataclass(frozen=True, kw_only=True)
class Noise(ImageAttack):
    """A random point of the ball, uniform in every value of every pixel."""

    norm: ClassVar[Literal["linf"]] = "linf"
    needs_gradient: ClassVar[bool] = False

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """x + u with u uniform in [-eps, eps]."""
        return images + torch.empty_like(images).uniform_(-eps, eps)


@dataclass(frozen=True, kw_only=True)
class SPSA(ImageAttack):
    """Simultaneous perturbation stochastic approximation (Uesato et al., ICML 2018).

    The gradient of the margin, the largest other logit minus that of the label, is estimated from differences
    along random directions of signs, and Adam climbs it within the ball.

    Args:
        steps: steps of Adam.
        samples: random directions of a step; each takes two forward passes.
        delta: length of the differences in every value.
        learning_rate: of Adam.
    """

    norm: ClassVar[Literal["linf"]] = "linf"
    needs_gradient: ClassVar[bool] = False

    steps: Count = 10
    samples: Count = 128
    delta: Positive = 0.01
    learning_rate: Positive = 0.01

    @torch.no_grad()
    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The last point."""
        shift = torch.empty_like(images).uniform_(-eps, eps)
        shift = (images + shift).clamp(*bounds) - images
        adam = torch.optim.Adam([shift], lr=self.learning_rate, maximize=True)
        for _ in range(self.steps):
            shift.grad = self._gradient(model, images + shift, labels)
            adam.step()
            shift.copy_((images + shift.clamp(-eps, eps)).clamp(*bounds) - images)
        return images + shift

    def _gradient(self, model: nn.Module, points: Tensor, labels: Tensor) -> Tensor:
        """The mean over directions v of v (f(x + delta v) - f(x - delta v)) / (2 delta), f the margin."""
        total = torch.zeros_like(points)
        both = torch.cat([labels, labels])
        for _ in range(self.samples):
            signs = torch.randint_like(points, 2).mul_(2).sub_(1)
            step = self.delta * signs
            ahead, behind = margins(model(torch.cat([points + step, points - step])), both).chunk(2)
            total += (ahead - behind)[:, None, None, None] * signs
        return total / (2 * self.delta * self.samples)


@dataclass(frozen=True, kw_only=True)
class Square(ImageAttack):
    """Square Attack: random squares of plus or minus eps (Andriushchenko et al., ECCV 2020), by pyautoattack.

    Args:
        queries: largest number of forward passes an image; the sizes of the squares are scheduled over them.
        initial_share: share of the image that the first squares cover.
    """

    norm: ClassVar[Literal["linf"]] = "linf"
    needs_gradient: ClassVar[bool] = False

    takes_pixels: ClassVar[bool] = True

    queries: Count = 5000
    initial_share: Positive = 0.8

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The image with the smallest margin found."""
        from pyautoattack.square import SquareAttack

        attack = SquareAttack(
            model,
            norm="Linf",
            n_queries=self.queries,
            eps=eps,
            p_init=self.initial_share,
            seed=_drawn_seed(),
            device=images.device,
        )
        return attack.perturb(images, labels)


@dataclass(frozen=True, kw_only=True)
class AutoAttack(ImageAttack):
    """AutoAttack in its standard version (Croce, Hein, ICML 2020), by pyautoattack.

    It consists of APGD on the cross-entropy, targeted APGD and targeted FAB on up to nine classes, and Square
    with 5000 queries. Each attacks what the ones before it have left.
    """

    norm: ClassVar[Literal["linf"]] = "linf"
    takes_pixels: ClassVar[bool] = True
    fewest_classes: ClassVar[int] = 4  # its targeted loss compares four logits

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The images of the first part that succeeded; the image itself where none did."""
        import pyautoattack

        with torch.no_grad():
            classes = model(images[:1]).size(1)
        require_classes(self, classes)
        attack = pyautoattack.AutoAttack(
            model, eps=eps, norm="Linf", seed=_drawn_seed(), device=images.device, version="standard"
        )
        attack.apgd_targeted.n_target_classes = attack.fab.n_target_classes = min(9, classes - 1)
        with _warnings_as_notes("auto-attack"):
            return attack.run_standard_evaluation(images, labels, batch_size=len(images))[0]


def margins(logits: Tensor, labels: Tensor) -> Tensor:
    """The largest other logit minus that of the label, (B,): positive where the model is wrong."""
    others = logits.scatter(1, labels[:, None], -torch.inf)
    return others.amax(dim=1) - logits.gather(1, labels[:, None]).squeeze(1)


@contextlib.contextmanager
def _warnings_as_notes(logger: str) -> Iterator[None]:
    """Give the warnings of a library's logger as notes: AutoAttack's are signs of a masked gradient."""
    source, handler = logging.getLogger(logger), _Notes(logging.WARNING)
    propagates, source.propagate = source.propagate, False
    source.addHandler(handler)
    try:
        yield
    finally:
        source.removeHandler(handler)
        source.propagate = propagates


class _Notes(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        note(f"{record.name}: {' '.join(record.getMessage().split())}")


def _drawn_seed() -> int:
    """A seed for a library that seeds torch itself, drawn from the generator of the batch."""
    return int(torch.randint(2**31, ()))
