"""Attacks on images: what they may change, and what they must find where the answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention_lab.robustness import ATTACKS, attack_images, make_attack
from kernel_attention_lab.robustness.image_attack import attacked_cases

EPS = 0.1
BRIEF = {
    "spsa": {"samples": 16},
    "cw": {"steps": 60, "search_steps": 2, "initial_const": 1.0, "learning_rate": 0.01},
    "square": {"queries": 100},
}
IN_A_BALL = [name for name in ATTACKS if ATTACKS[name].norm == "linf"]
ULP = torch.finfo(torch.float32).eps


def attack(name: str, **options):
    return make_attack(name, BRIEF.get(name, {}) | options)


def breakable(linear: nn.Module, images: Tensor, labels: Tensor, eps: float) -> Tensor:
    """The largest margin of each class in the ball within [0, 1], (n, classes), of a linear classifier.

    It is reached at a corner, entry by entry. The margin of the label itself is -inf.
    """
    weight, bias = linear[-1].weight.double(), linear[-1].bias.double()
    flat = images.flatten(1).double()
    low, high = (flat - eps).clamp_min(0), (flat + eps).clamp_max(1)
    difference = weight[None] - weight[labels][:, None]
    best = torch.maximum(difference * low[:, None], difference * high[:, None]).sum(-1)
    return (best + bias[None] - bias[labels][:, None]).scatter(1, labels[:, None], -torch.inf)


@pytest.mark.parametrize("name", [name for name in ATTACKS if name != "autoattack"])
def test_an_attack_stays_in_its_ball_and_leaves_everything_else_alone(name, convolutional, digits):
    images, labels = digits[0][1500:1511], digits[1][1500:1511].clone()  # in batches of 4
    labels[2] = (labels[2] + 1) % 10  # an image that the model has wrong from the start
    before, state = images.clone(), torch.get_rng_state()
    convolutional.train()
    result = attack_images(convolutional, images, labels, attack(name), eps=EPS, batch_size=4)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(images, before)
    assert convolutional.training
    assert all(parameter.requires_grad and parameter.grad is None for parameter in convolutional.parameters())
    convolutional.eval()
    shift = (result.images - images).flatten(1)
    assert result.images.min() >= 0
    assert result.images.max() <= 1
    if ATTACKS[name].norm == "linf":
        assert shift.abs().max() <= EPS + ULP
    if name == "sld":
        assert shift.abs().sum(1).max() <= 10 * (1 + 192 * ULP)
    assert torch.equal(result.images[2], images[2])
    assert torch.equal(result.predictions, convolutional(result.images).argmax(1))
    assert torch.equal(result.success, result.predictions != labels)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "autoattack" else []) for name in ATTACKS]
)
def test_the_same_seed_gives_the_same_images(name, convolutional, digits):
    images, labels = digits[0][1500:1503], digits[1][1500:1503]
    torch.manual_seed(1)
    first, second, other = (
        attack_images(convolutional, images, labels, attack(name), eps=EPS, seed=seed).images
        for seed in (3, 3, 4)
    )
    assert torch.equal(first, second)
    if name in ("pgd", "noise", "spsa"):
        assert not torch.equal(first, other)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "autoattack" else []) for name in IN_A_BALL]
)
def test_no_attack_breaks_a_linear_classifier_where_none_can(name, linear, digits):
    images, labels = digits[0][1500:1540], digits[1][1500:1540]
    if name == "autoattack":
        images, labels = images[:16], labels[:16]
    margins = breakable(linear, images, labels, EPS).amax(1)
    result = attack_images(linear, images, labels, attack(name), eps=EPS)
    success = result.success
    assert (result.images - images).abs().max() <= EPS + ULP
    assert torch.equal(success, linear(result.images).argmax(1) != labels)
    assert 0 < (margins > 0).sum() < len(images)
    # The logits are sums of 193 products of order one.
    assert not (success & (margins < -193 * ULP)).any()
    if name == "autoattack":
        # The best corner is the sign of one difference of weights; targeted APGD tries every class.
        assert success[margins > 193 * ULP].all()


def test_one_step_reaches_the_best_corner_of_two_classes(digits):
    """With two classes the gradient has one direction, so FGSM breaks exactly what can be broken."""
    images = digits[0][digits[1] < 2][:60].double()
    labels = digits[1][digits[1] < 2][:60]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 2)).double()
        model[-1].weight.data[1] = (images[labels == 1].mean(0) - images[labels == 0].mean(0)).flatten()
        model[-1].weight.data[0] = 0
        model[-1].bias.data.zero_()
        middle = (images[labels == 1].mean(0) + images[labels == 0].mean(0)).flatten() / 2
        model[-1].bias.data[1] = -model[-1].weight.data[1] @ middle
    for eps in (0.27, 0.3, 0.33):
        can = breakable(model, images, labels, eps).amax(1) > 0
        assert 0 < can.sum() < len(images)
        for name in ("fgsm", "pgd"):
            success = attack_images(model, images, labels, make_attack(name), eps=eps).success
            assert torch.equal(success, can)


def test_carlini_wagner_finds_the_nearest_image_of_a_linear_classifier(linear, digits):
    """The distance to a hyperplane is |margin| / |w|, a lower bound within [0, 1] that is nearly reached."""
    images, labels = digits[0][1500:1520] * 0.8 + 0.1, digits[1][1500:1520]
    options = {"steps": 200, "search_steps": 8, "initial_const": 1.0, "learning_rate": 0.01}
    result = attack_images(linear, images, labels, make_attack("cw", options))
    right = linear(images).argmax(1) == labels
    assert result.success.all()
    weight, logits = linear[-1].weight.detach(), linear(images).detach()
    reached = result.predictions
    gaps = (logits.gather(1, labels[:, None]) - logits.gather(1, reached[:, None])).squeeze(1)
    nearest = (gaps / (weight[labels] - weight[reached]).norm(dim=1))[right]
    found = (result.images - images).flatten(1).norm(dim=1)[right]
    assert (found >= nearest * (1 - 1e-4)).all()
    assert (found <= nearest * 1.1).all()  # eight halvings of the constant, and 200 steps of Adam


def test_restarts_only_add_successes(convolutional, digits):
    images, labels = digits[0][1500:1600], digits[1][1500:1600]
    once, thrice = (
        attack_images(
            convolutional, images, labels, make_attack("pgd", {"steps": 3, "restarts": restarts}), eps=0.08
        )
        for restarts in (1, 3)
    )
    assert (once.success <= thrice.success).all()
    assert once.success.sum() < thrice.success.sum()


def test_the_attacked_images_are_the_same_for_every_number_of_them():
    order = attacked_cases(1000, 1000)
    assert sorted(order) == list(range(1000))
    assert order != sorted(order)
    assert attacked_cases(1000, 64) == order[:64]
    assert attacked_cases(50, 64) == attacked_cases(50, 50)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"eps": 0.0}, "eps=0.0 must be a positive number"),
        ({"bounds": (0.2, 1.0)}, "images hold values from 0 to 1, outside the bounds (0.2, 1.0)"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"labels": torch.zeros(3, dtype=torch.long)}, "images (4, 3, 8, 8) and labels (3,)"),
        ({"images": torch.full((4, 3, 8, 8), torch.nan)}, "images hold values from nan to nan"),
    ],
)
def test_bad_arguments(change, message, linear, digits):
    given = {"images": digits[0][:4], "labels": digits[1][:4], "attack": make_attack("fgsm")} | change
    with pytest.raises(InputError) as error:
        attack_images(linear, **given)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fgms", {}, "unknown attack 'fgms'; did you mean 'fgsm'"),
        ("pgd", {"step": 3}, "unknown option of attack pgd 'step'"),
        ("pgd", {"steps": 0}, "attack pgd: steps=0 must be a whole number of at least 1"),
        ("pgd", {"gradient": "none"}, "attack pgd: gradient='none' must be one of"),
        ("sld", {"sparsity": 1.5}, "attack sld: sparsity=1.5 must be"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(InputError) as error:
        make_attack(name, options)
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["square", "autoattack"])
def test_what_clips_to_pixels_refuses_other_bounds(name, linear, digits):
    with pytest.raises(InputError, match="use protocol pixel"):
        attack_images(linear, digits[0][:4], digits[1][:4], make_attack(name), bounds=(-torch.inf, torch.inf))


def test_attacks_run_on_a_machine_without_git(forks):
    """Foolbox imports GitPython, which refuses without git unless it is told otherwise."""
    script = (
        "import torch\n"
        "from kernel_attention_lab.robustness import attack_images, make_attack\n"
        "model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 4))\n"
        "images, labels = torch.rand(2, 3, 4, 4), torch.zeros(2, dtype=torch.long)\n"
        "print(len(attack_images(model, images, labels, make_attack('fgsm')).success))"
    )
    result = forks.run("-c", script, env={"PATH": "/nowhere"})
    assert (result.returncode, result.stdout) == (0, "2\n"), result.stderr
