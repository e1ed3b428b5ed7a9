"""Attacks that follow the gradient: FGSM, PGD, sparse L1 descent and Carlini-Wagner, computed by foolbox."""

from __future__ import annotations

import contextlib
import math
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from kernel_attention.fields import Count, NonNegative, Positive, Share
from kernel_attention.tensors.recompute import formulas_only
from kernel_attention_lab.robustness.image_attack import Bounds, ImageAttack

if TYPE_CHECKING:
    from foolbox.attacks.sparse_l1_descent_attack import SparseL1DescentAttack

Gradient = Literal["exact", "straight_through", "smooth"]


@dataclass(frozen=True, kw_only=True)
class FGSM(ImageAttack):
    """Fast gradient sign method: one step of size eps (Goodfellow, Shlens, Szegedy, ICLR 2015).

    Args:
        gradient: exact, or that of a surrogate of the clamps in the model (``SurrogateClamp``).
    """

    norm: ClassVar[Literal["linf"]] = "linf"

    gradient: Gradient = "exact"

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """x + eps sgn(gradient of the loss)."""
        attack = _foolbox().attacks.LinfFastGradientAttack()
        with SurrogateClamp(self.gradient):
            return _run(attack, model, images, labels, bounds, epsilon=eps)


@dataclass(frozen=True, kw_only=True)
class PGD(ImageAttack):
    """Projected gradient descent on the cross-entropy (Madry et al., ICLR 2018).

    Args:
        steps: number of steps.
        step_size: of a step, as a fraction of eps.
        random_start: whether to begin at a random point of the ball.
        restarts: number of beginnings; an image counts as attacked if one of them succeeds.
        gradient: exact, or that of a surrogate of the clamps in the model (``SurrogateClamp``).
    """

    norm: ClassVar[Literal["linf"]] = "linf"

    steps: Count = 20
    step_size: Positive = 0.15
    random_start: bool = True
    restarts: Count = 1
    gradient: Gradient = "exact"

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The last point of every restart that succeeds first, or of the first restart."""
        attack = _foolbox().attacks.LinfPGD(
            rel_stepsize=self.step_size, steps=self.steps, random_start=self.random_start
        )
        found = images
        unbroken = torch.ones_like(labels, dtype=torch.bool)
        for restart in range(self.restarts):
            with SurrogateClamp(self.gradient):
                points = _run(attack, model, images[unbroken], labels[unbroken], bounds, epsilon=eps)
            broken = _is_broken(model, points, labels[unbroken])
            taken = broken if restart else torch.ones_like(broken)
            places = unbroken.nonzero().squeeze(1)
            found = found.index_copy(0, places[taken], points[taken])
            unbroken = unbroken.index_fill(0, places[broken], False)
            if not unbroken.any():
                break
        return found


@dataclass(frozen=True, kw_only=True)
class SparseL1Descent(ImageAttack):
    """Sparse L1 descent: steps along the largest entries of the gradient (Tramèr, Boneh, NeurIPS 2019).

    Args:
        radius: of the ball in the 1-norm.
        steps: number of steps.
        step_size: 1-norm of a step.
        sparsity: share of the gradient's entries that a step leaves out.
        projection: ``"euclidean"``: onto the nearest point of the ball, as in the paper; ``"radial"``:
            towards its centre, as in cleverhans, the library of the released kernel-PCA code.
    """

    norm: ClassVar[Literal["l1"]] = "l1"
    takes_eps: ClassVar[bool] = False

    radius: Positive = 10.0
    steps: Count = 20
    step_size: Positive = 1.0
    sparsity: Share = 0.99
    projection: Literal["euclidean", "radial"] = "euclidean"

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The last point."""
        attack = self._attack(_quantile(self.sparsity, images[0].numel()))
        return _run(attack, model, images, labels, bounds, epsilon=self.radius)

    def _attack(self, quantile: float) -> SparseL1DescentAttack:
        base = _foolbox().attacks.SparseL1DescentAttack
        options = {"quantile": quantile, "abs_stepsize": self.step_size, "steps": self.steps}
        if self.projection == "euclidean":
            return base(**options)
        radial = _foolbox().attacks.gradient_descent_base.L1BaseGradientDescent.project
        return type("RadialSparseL1Descent", (base,), {"project": radial})(**options)


@dataclass(frozen=True, kw_only=True)
class CarliniWagner(ImageAttack):
    """The attack of Carlini and Wagner in the 2-norm: the nearest image of another class (S&P 2017).

    It minimises the distance and has no radius. An image for which it finds nothing stays as it is.

    Args:
        steps: steps of the optimiser in each step of the search.
        search_steps: steps of the search for the constant that weighs the loss against the distance.
        learning_rate: of Adam.
        initial_const: the constant at first.
        confidence: by how much the logit of another class must exceed that of the label.
    """

    norm: ClassVar[Literal["l2"]] = "l2"
    takes_eps: ClassVar[bool] = False
    minimises: ClassVar[bool] = True

    steps: Count = 1000
    search_steps: Count = 5
    learning_rate: Positive = 5e-3
    initial_const: Positive = 1e-2
    confidence: NonNegative = 0.0

    def perturb(self, model: nn.Module, images: Tensor, labels: Tensor, eps: float, bounds: Bounds) -> Tensor:
        """The nearest image found."""
        attack = _foolbox().attacks.L2CarliniWagnerAttack(
            binary_search_steps=self.search_steps,
            steps=self.steps,
            stepsize=self.learning_rate,
            confidence=self.confidence,
            initial_const=self.initial_const,
            # It looks at the loss of the whole batch, so an image's result would depend on its neighbours.
            abort_early=False,
        )
        found = _run(attack, model, images, labels, bounds)
        # foolbox gives a black image where it finds nothing.
        is_found = (found != 0).flatten(1).any(dim=1) & _is_broken(model, found, labels)
        return torch.where(is_found[:, None, None, None], found, images)


def _foolbox() -> Any:
    """The library. It imports GitPython, which fails on a machine without git unless told to be quiet."""
    os.environ.setdefault("GIT_PYTHON_REFRESH", "quiet")
    import foolbox
    import foolbox.attacks.gradient_descent_base

    return foolbox


def _run(
    attack: Any, model: nn.Module, images: Tensor, labels: Tensor, bounds: Bounds, **options: float
) -> Tensor:
    """The attack's own result, before foolbox projects it once more with an error of rounding."""
    foolbox = _foolbox()
    wrapped = foolbox.PyTorchModel(model, bounds=bounds, device=images.device)
    return attack.run(wrapped, images, foolbox.criteria.Misclassification(labels), **options)


@torch.no_grad()
def _is_broken(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    return model(images).argmax(dim=1) != labels


def _quantile(sparsity: float, entries: int) -> float:
    """The quantile at which ``floor(sparsity * entries) - 1`` entries are left out, as in cleverhans.

    It lies half-way between two entries, so that rounding does not decide which are kept.
    """
    kept_from = max(math.floor(sparsity * entries), 1) - 1
    return max(kept_from - 0.5, 0.0) / max(entries - 1, 1)


class SurrogateClamp(TorchFunctionMode):
    """Inside the block, a clamp between two tensors has its value but the gradient of a surrogate.

    RPC-Attention clamps its residual at every step (soft thresholding). Where the clamp holds, the gradient
    is zero, and an attack by gradients could be weak for this reason alone. BPDA, an approximate derivative
    of the backward pass, keeps the forward pass and differentiates something smoother (Athalye, Carlini,
    Wagner, "Obfuscated Gradients Give a False Sense of Security", ICML 2018).

    Layers take their formulas there: a pass with gradients of its own would not ask the surrogate.

    Args:
        gradient: ``"exact"``: the clamp's own; ``"straight_through"``: that of the identity; ``"smooth"``:
            that of c + w tanh((x - c)/w), with c the middle and w half the width of the interval.
    """

    def __init__(self, gradient: Gradient) -> None:
        super().__init__()
        self.gradient = gradient
        self._inside = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._inside.enter_context(formulas_only())
        super().__enter__()
        return self

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        self._inside.close()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.gradient == "exact" or func not in (torch.clamp, torch.Tensor.clamp):
            return func(*args, **kwargs)
        call = {**dict(zip(("input", "min", "max"), args, strict=False)), **kwargs}
        x, lower, upper = call.get("input", call.get("self")), call.get("min"), call.get("max")
        if not (isinstance(x, Tensor) and isinstance(lower, Tensor) and isinstance(upper, Tensor)):
            return func(*args, **kwargs)
        return _Surrogate.apply(x, lower, upper, self.gradient == "smooth")


class _Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, lower: Tensor, upper: Tensor, is_smooth: bool) -> Tensor:
        ctx.save_for_backward(x, lower, upper)
        ctx.is_smooth = is_smooth
        return x.clamp(lower, upper)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        if not ctx.is_smooth:
            return grad, None, None, None
        with torch.enable_grad():
            inputs = [tensor.detach().requires_grad_() for tensor in ctx.saved_tensors]
            found = torch.autograd.grad(_smooth(*inputs), inputs, grad)
        return (*found, None)


def _smooth(x: Tensor, lower: Tensor, upper: Tensor) -> Tensor:
    middle, half = (lower + upper) / 2, (upper - lower) / 2
    return middle + half * torch.tanh((x - middle) / half.clamp_min(torch.finfo(x.dtype).tiny))
