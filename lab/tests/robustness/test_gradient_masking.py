"""RPC-Attention's gradient is that of its n steps, surrogates replace it alone, a masked one is noticed."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention_lab.robustness import (
    AttackStep,
    SurrogateClamp,
    make_attack,
    masking_warnings,
    measure_attack,
)
from kernel_attention_lab.robustness.gradient_attacks import Gradient

GRADIENTS: tuple[Gradient, ...] = ("exact", "straight_through", "smooth")


@pytest.fixture
def batch(digits) -> tuple[Tensor, Tensor]:
    return digits[0][1500:1508].double(), digits[1][1500:1508]


@pytest.fixture
def precise(vision) -> nn.Module:
    return copy.deepcopy(vision).double()


def gradient_of(model: nn.Module, images: Tensor, labels: Tensor, kind: Gradient) -> tuple[Tensor, Tensor]:
    images = images.clone().requires_grad_()
    with SurrogateClamp(kind):
        loss = F.cross_entropy(model(images), labels)
    return loss.detach(), torch.autograd.grad(loss, images)[0]


def clamped(model: nn.Module, images: Tensor) -> float:
    """The share of the residual's entries that the first layer's last clamp holds."""
    attention = model.layers[0].attention
    seen = []
    hook = attention.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    model(images)
    hook.remove()
    return (attention.pursuit(seen[0]).sparse != 0).double().mean().item()


def test_the_gradient_through_the_iterations_is_exact(precise, batch):
    """Against central differences in float64 along random directions, where most clamps hold.

    A difference of length h has an error of h^2 from its third derivative, and of 1e-16 / h from rounding. It
    is wrong where a clamp begins or ceases to hold within h, so the best of three lengths counts.
    """
    images, labels = batch
    assert 0.5 < clamped(precise, images) < 1.0
    _, gradient = gradient_of(precise, images, labels, "exact")
    assert gradient.abs().max() > 0
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        direction = torch.randn(images.shape, generator=generator, dtype=torch.float64)
        expected = (gradient * direction).sum()
        errors = []
        for h in (1e-6, 1e-7, 1e-8):
            ahead, behind = (F.cross_entropy(precise(images + s * direction), labels) for s in (h, -h))
            errors.append(((ahead - behind) / (2 * h) - expected).abs())
        assert min(errors) <= 1e-7 + 1e-6 * expected.abs()


def test_a_surrogate_changes_the_gradient_alone(precise, batch):
    losses, gradients = zip(*(gradient_of(precise, *batch, kind) for kind in GRADIENTS), strict=True)
    assert losses[0] == losses[1] == losses[2]
    exact, straight, smooth = gradients
    assert torch.isfinite(straight).all()
    assert torch.isfinite(smooth).all()
    assert not torch.allclose(exact, straight)
    assert not torch.allclose(exact, smooth)
    assert not torch.allclose(straight, smooth)


def test_surrogates_are_the_gradient_where_no_clamp_holds(precise, batch):
    """At a large threshold, as the papers' lambda gives it, the clamp is the identity, and tanh nearly is."""
    for layer in precise.layers:
        layer.attention.lam = 1e6
    assert clamped(precise, batch[0]) == 0.0
    exact, straight, smooth = (gradient_of(precise, *batch, kind)[1] for kind in GRADIENTS)
    torch.testing.assert_close(straight, exact, rtol=1e-12, atol=0)
    # The derivative of tanh is 1 - u^2, and u is of order 1e-5 here; each of six clamps adds such an error.
    assert (smooth - exact).abs().max() < 1e-8 * exact.abs().max()


def test_the_smooth_surrogate_is_the_derivative_of_its_formula():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(3, 5, 7, generator=generator, dtype=torch.float64, requires_grad=True)
    threshold = torch.rand(3, 1, 1, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    with SurrogateClamp("smooth"):
        value = x.clamp(-threshold, threshold)
        untouched = x.clamp(-0.1, 0.1)
    assert torch.equal(value, x.clamp(-threshold, threshold))
    expected = threshold * torch.tanh(x / threshold)
    for found, wanted in zip(
        torch.autograd.grad((weight * value).sum(), (x, threshold)),
        torch.autograd.grad((weight * expected).sum(), (x, threshold)),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted)
    assert torch.equal(torch.autograd.grad(untouched.sum(), x)[0], (x.abs() <= 0.1).double())


def test_a_threshold_of_zero_gives_no_nan():
    x, threshold = torch.randn(4, requires_grad=True), torch.zeros(1, requires_grad=True)
    with SurrogateClamp("smooth"):
        value = x.clamp(-threshold, threshold)
    for gradient in torch.autograd.grad(value.sum(), (x, threshold)):
        assert torch.isfinite(gradient).all()


def entry(model: nn.Module, images: Tensor, labels: Tensor, attack: str, cases: int = 64, **options) -> dict:
    step = AttackStep(attack=attack, eps=0.1, cases=cases, options=options)
    return measure_attack(model, images[:cases], labels[:cases], step)


class Saturated(nn.Module):
    """The same classes with logits so large that the cross-entropy is flat in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return 1e4 * self.model(images)


def test_a_masked_gradient_is_noticed(convolutional, digits):
    images, labels = digits[0][1500:1564], digits[1][1500:1564]
    masked = Saturated(convolutional)
    entries = [
        entry(masked, images, labels, "pgd"),
        entry(masked, images, labels, "square", cases=32, queries=300),
        entry(masked, images, labels, "noise"),
    ]
    (warning,) = masking_warnings(entries)
    assert warning.startswith("square breaks more than pgd at eps 0.1 (protocol pixel): ")
    assert " of 32 images that pgd does not break, against 0 the other way round (p = " in warning


def test_an_honest_gradient_gives_no_warning(convolutional, digits):
    images, labels = digits[0][1500:1564], digits[1][1500:1564]
    attacks = ("pgd", "fgsm", "noise", "spsa")
    entries = [entry(convolutional, images, labels, name) for name in attacks]
    entries.append(entry(convolutional, images, labels, "square", queries=100))
    entries.append(entry(convolutional, images, labels, "pgd", restarts=3))
    assert masking_warnings(entries) == []


def test_only_attacks_under_the_same_conditions_are_compared():
    def made(attack: str, bits: str, **changes) -> dict:
        step = AttackStep(attack=attack, cases=8, options={}).record()
        return step | {"bits": bits, "cases": 8, "accuracy": 0.5} | changes

    weak, strong = made("pgd", "ff"), made("square", "00")
    (warning,) = masking_warnings([weak, strong])
    assert "8 of 8 images that pgd does not break, against 0 the other way round (p = 0.0039)" in warning
    assert masking_warnings([weak, strong | {"eps": 0.5}]) == []
    assert masking_warnings([weak, strong | {"protocol": "paper"}]) == []
    assert masking_warnings([weak, made("autoattack", "00")]) == []
    assert masking_warnings([weak, made("cw", "00")]) == []
    assert masking_warnings([made("pgd", "00"), made("square", "00")]) == []
    several = [weak, made("fgsm", "7f"), made("pgd", "3f", transferred=True)]
    assert [text.partition(" breaks")[0] for text in masking_warnings(several)] == [
        "fgsm",
        "pgd, transferred",
    ]


@pytest.mark.parametrize("gradient", GRADIENTS)
def test_pgd_with_a_surrogate_follows_it(gradient, vision, digits):
    """One step without a random start moves every pixel by the sign of that gradient."""
    images, labels = digits[0][1500:1508], digits[1][1500:1508]
    attack = make_attack("pgd", {"steps": 1, "step_size": 1.0, "random_start": False, "gradient": gradient})
    found = attack.perturb(vision, images, labels, 0.1, (-torch.inf, torch.inf))
    _, expected = gradient_of(vision, images, labels, gradient)
    torch.testing.assert_close(found, images + 0.1 * expected.sign(), rtol=0, atol=2**-22)
