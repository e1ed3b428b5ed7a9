"""Our attacks against those of cleverhans and torchattacks, on the same model and images.

Where an attack draws nothing, the images agree to rounding. Where it draws, the numbers of broken images
differ by chance: an image that one attack breaks and the other does not is as likely broken by either, so the
variance of the difference is the number of such images.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kernel_attention_lab.robustness import attack_images, find_protocol, make_attack
from kernel_attention_lab.robustness.image_attack import attackable, seeded

EPS = 8 / 255
PIXELS = (0.0, 1.0)
EVERYTHING = (-math.inf, math.inf)

# Where the Makefile puts both; an environment that has them itself needs no such folder.
if (_hosts := Path(sys.prefix) / "hosts").is_dir() and str(_hosts) not in sys.path:
    sys.path.append(str(_hosts))


@pytest.fixture(scope="module")
def cleverhans():
    pytest.importorskip("cleverhans", reason="cleverhans is not installed")
    from cleverhans.torch.attacks.carlini_wagner_l2 import carlini_wagner_l2
    from cleverhans.torch.attacks.fast_gradient_method import fast_gradient_method
    from cleverhans.torch.attacks.projected_gradient_descent import projected_gradient_descent
    from cleverhans.torch.attacks.sparse_l1_descent import sparse_l1_descent
    from cleverhans.torch.attacks.spsa import spsa

    return SimpleNamespace(
        fgsm=fast_gradient_method, pgd=projected_gradient_descent, sld=sparse_l1_descent,
        cw=carlini_wagner_l2, spsa=spsa,
    )  # fmt: skip


@pytest.fixture(scope="module")
def torchattacks():
    return pytest.importorskip("torchattacks", reason="torchattacks is not installed")


@pytest.fixture
def images(digits) -> Tensor:
    return digits[0][1500:1564]


@pytest.fixture
def labels(digits) -> Tensor:
    return digits[1][1500:1564]


def ours(model: nn.Module, images: Tensor, labels: Tensor, name: str, bounds=PIXELS, eps=EPS, **options):
    """The attack on every image, also on those that the model has wrong, as the other libraries do it."""
    with attackable(model), seeded(0, images.device):
        return make_attack(name, options).perturb(model, images, labels, eps, bounds).detach()


def broken(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    with torch.no_grad():
        return model(images).argmax(1) != labels


def assert_as_often(first: Tensor, second: Tensor) -> None:
    """Two attacks break as many images, up to four standard deviations of their random draws."""
    differing = (first ^ second).sum().item()
    assert abs(first.sum().item() - second.sum().item()) <= 4 * math.sqrt(max(differing, 1))


@pytest.mark.parametrize("bounds", [PIXELS, EVERYTHING])
def test_fgsm_is_cleverhans_exactly(bounds, cleverhans, vision, images, labels):
    clip = (None, None) if bounds == EVERYTHING else bounds
    theirs = cleverhans.fgsm(vision, images, EPS, np.inf, *clip, y=labels)
    # Ours is projected to the ball once more, which may round the last bit of a number below 2.
    torch.testing.assert_close(
        ours(vision, images, labels, "fgsm", bounds), theirs.detach(), rtol=0, atol=2**-23
    )


def test_pgd_without_a_random_start_is_cleverhans(cleverhans, vision, images, labels):
    theirs = cleverhans.pgd(
        vision, images, EPS, 0.15 * EPS, 20, np.inf, *PIXELS, y=labels, rand_init=False
    ).detach()
    found = ours(vision, images, labels, "pgd", random_start=False)
    # A gradient that is nearly zero may change its sign with the last bit; a step then goes the other way.
    assert ((found - theirs).abs() > 20 * 2**-23).double().mean() < 1e-2
    assert torch.equal(broken(vision, found, labels), broken(vision, theirs, labels))


@pytest.mark.parametrize("steps", [4, 20])
def test_sparse_l1_descent_is_cleverhans(steps, cleverhans, vision, images, labels):
    """With the radial projection, without clipping. Twenty steps of 0.5 leave the ball of radius 3."""
    theirs = cleverhans.sld(vision, images, 3.0, 0.5, steps, y=labels)
    found = ours(
        vision, images, labels, "sld", EVERYTHING,
        radius=3.0, step_size=0.5, steps=steps, projection="radial",
    )  # fmt: skip
    # Which entries are the largest may hang on the last bit.
    assert ((found - theirs).abs() > 192 * steps * 2**-23).double().mean() < 1e-2
    assert (broken(vision, found, labels) ^ broken(vision, theirs, labels)).sum() <= 1


def test_carlini_wagner_is_cleverhans(cleverhans, vision, images, labels):
    """In one step of the search: cleverhans begins the next where the last has ended, the paper does not."""
    options = {"steps": 100, "initial_const": 1.0, "learning_rate": 0.01}
    found = ours(vision, images[:24], labels[:24], "cw", search_steps=1, **options)
    theirs = cleverhans.cw(
        vision, images[:24], 10, y=labels[:24], lr=0.01, initial_const=1.0, binary_search_steps=1,
        max_iterations=100,
    )  # fmt: skip
    assert torch.equal(broken(vision, found, labels[:24]), broken(vision, theirs, labels[:24]))
    lengths, their_lengths = ((each - images[:24]).flatten(1).norm(dim=1) for each in (found, theirs))
    # Cleverhans measures from the image, foolbox from the image as it returns from the tanh with a factor
    # 1 - 1e-6: with 192 entries of at most 5e-7, the squares differ in the sixth digit of the loss.
    torch.testing.assert_close(lengths, their_lengths, rtol=1e-2, atol=1e-2)


def test_spsa_breaks_as_many_as_cleverhans_where_its_gradient_is_right(cleverhans, digits):
    """Cleverhans 4.0 takes its differences at 2 x + delta v. A linear model of two classes does not mind."""
    chosen = digits[1] < 2
    images, labels = digits[0][chosen][:40], digits[1][chosen][:40]
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2))
    difference = images[labels == 1].mean(0) - images[labels == 0].mean(0)
    middle = (images[labels == 1].mean(0) + images[labels == 0].mean(0)) / 2
    model[-1].weight.data = torch.stack([torch.zeros(192), difference.flatten()])
    model[-1].bias.data = torch.tensor([0.0, -(difference * middle).sum()])
    found = broken(model, ours(model, images, labels, "spsa", eps=0.3, samples=16, learning_rate=0.1), labels)
    with seeded(1, images.device):
        theirs = cleverhans.spsa(
            model, images, 0.3, 10, clip_min=0.0, clip_max=1.0, y=labels, spsa_samples=16, learning_rate=0.1
        )
    assert 0 < found.sum() < len(images)
    assert_as_often(found, broken(model, theirs, labels))


@pytest.mark.slow
def test_square_breaks_as_many(torchattacks, vision, images, labels):
    found = broken(vision, ours(vision, images, labels, "square", eps=2 * EPS, queries=150), labels)
    theirs = torchattacks.Square(vision, eps=2 * EPS, n_queries=150, seed=1)(images, labels)
    assert found.sum() > broken(vision, images, labels).sum()
    assert_as_often(found, broken(vision, theirs, labels))


@pytest.mark.slow
def test_autoattack_breaks_the_same_images(torchattacks, vision, images, labels):
    """Four attacks in turn: their draws decide nothing about images that are not at the edge."""
    images, labels = images[:2], labels[:2]
    found = attack_images(vision, images, labels, make_attack("autoattack"), eps=EPS).success
    attack = torchattacks.AutoAttack(vision, eps=EPS, version="standard", n_classes=10, seed=1)
    assert torch.equal(found, broken(vision, attack(images, labels), labels))


def test_the_paper_protocol_is_cleverhans_on_normalised_images(cleverhans, vision, images, labels):
    """As the released code calls it: normalised inputs, no clipping, the model's own classes as labels."""
    mean, std = (torch.tensor(each)[:, None, None] for each in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))

    class Normalised(nn.Module):
        def forward(self, inputs: Tensor) -> Tensor:
            return vision(inputs * std + mean)

    theirs = cleverhans.fgsm(Normalised(), (images - mean) / std, EPS, np.inf)
    protocol, attack = find_protocol("paper"), make_attack("fgsm")
    target = protocol.target(vision, images, labels, attack)
    bounds = protocol.bounds(attack)
    found = attack_images(target.model, target.inputs, target.labels, attack, eps=EPS, bounds=bounds)
    # A normalised value lies within 2.7, so a sum has an error of at most 2^-22.
    torch.testing.assert_close(found.images, theirs.detach(), rtol=0, atol=2**-21)
    assert found.images.min() < ((0 - mean) / std).min()  # nothing is clipped
    assert torch.equal(target.labels, vision(images).argmax(1))
    assert not torch.equal(target.labels, labels)
