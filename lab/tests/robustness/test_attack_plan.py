"""Plans as data, measured steps, and attacks on every mechanism."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.mechanisms import list_attention
from kernel_attention.models import VisionTransformer
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.robustness import (
    ATTACKS,
    PLANS,
    PROTOCOLS,
    AttackStep,
    choose_steps,
    eps_text,
    make_attack,
    measure_attack,
    read_eps,
    table_step,
)


def forwards(step: AttackStep) -> int:
    """Forward passes of an image in an attack without gradients."""
    options = step.record()["options"]
    return options["queries"] if step.attack == "square" else options["steps"] * 2 * options["samples"]


def test_the_table_is_at_one_step_of_a_pixel_with_the_numbers_that_the_page_gives():
    steps = {step.attack: step for step in PLANS["table"]}
    assert {name: step.cases for name, step in steps.items()} == {
        "clean": 512, "fgsm": 512, "pgd": 512, "sld": 512, "noise": 512,
        "square": 128, "spsa": 128, "cw": 128,
    }  # fmt: skip
    assert all(step.protocol == "pixel" for step in steps.values())
    assert {name for name, step in steps.items() if step.eps == 1 / 255} == {
        "fgsm", "pgd", "noise", "square", "spsa",
    }  # fmt: skip
    assert forwards(steps["square"]) == 500
    assert forwards(steps["spsa"]) == 10 * 64
    pgd = steps["pgd"].record()["options"]
    assert (pgd["steps"], pgd["step_size"], pgd["restarts"], pgd["gradient"]) == (20, 0.15, 1, "exact")
    cw = steps["cw"].record()["options"]
    assert (cw["search_steps"], cw["steps"]) == (2, 100)
    assert [(step.attack, step.cases) for step in PLANS["autoattack"]] == [("autoattack", 64)]
    for name, protocol in (("curves", "pixel"), ("paper", "paper")):
        assert {(step.attack, step.eps, step.protocol) for step in PLANS[name]} == {
            (attack, count / 255, protocol) for attack in ("fgsm", "pgd") for count in range(1, 7)
        }


def test_steps_by_name_and_by_plan():
    assert choose_steps() == list(PLANS["table"])
    both = choose_steps(plans=["table", "curves", "table"])
    assert len(both) == len(PLANS["table"]) + len(PLANS["curves"])
    curve = choose_steps(attacks=["fgsm", "noise"], eps=[0.1, 0.2], protocol="paper", cases=7, seed=3)
    assert [(step.attack, step.eps) for step in curve] == [
        ("fgsm", 0.1), ("fgsm", 0.2), ("noise", 0.1), ("noise", 0.2),
    ]  # fmt: skip
    assert all((step.cases, step.seed, step.protocol) == (7, 3, "paper") for step in curve)
    transferred = [step for step in choose_steps(transfer=True) if step.transferred]
    assert [(step.attack, step.eps) for step in transferred] == [("fgsm", 1 / 255), ("pgd", 1 / 255)]
    assert len(choose_steps(attacks=["sld"], eps=[0.1, 0.2])) == 1  # its ball has no eps
    quick = choose_steps(plans=["table", "autoattack"], quick=True)
    assert max(step.cases for step in quick) == 16
    assert max(forwards(step) for step in quick if step.attack in ("square", "spsa")) <= 50


def test_the_paper_protocol_has_the_options_of_the_released_code():
    cw = table_step("cw", "paper", 0.03).record()
    assert cw["options"]["confidence"] == 0.03
    assert (cw["options"]["search_steps"], cw["options"]["steps"]) == (5, 1000)
    assert table_step("noise", "paper").eps == 0.3
    assert table_step("sld", "paper").record()["options"] == {
        "radius": 10.0, "steps": 20, "step_size": 1.0, "sparsity": 0.99, "projection": "radial",
    }  # fmt: skip
    assert table_step("spsa", "paper").record()["options"]["samples"] == 128


def test_a_step_is_json_and_comes_back_the_same():
    for steps in PLANS.values():
        for step in steps:
            again = json.loads(json.dumps(step.record()))
            assert again == step.record()
            assert AttackStep(**again).record() == step.record()


def test_radii_in_words():
    assert read_eps("1/255") == 1 / 255
    assert read_eps(" 0.05 ") == 0.05
    assert [eps_text(value) for value in (None, 2 / 255, 0.3, 1e-9)] == ["", "2/255", "0.3", "1e-09"]
    for text in ("", "x", "1/0", "-1/255", "0", "1e999"):
        with pytest.raises(InputError, match="must be a positive number"):
            read_eps(text)


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("attack", [name for name in ATTACKS if name != "autoattack"])
def test_a_measured_step_is_the_models_own_answer(attack, protocol, convolutional, digits):
    if protocol == "paper" and ATTACKS[attack].takes_pixels:
        with pytest.raises(InputError, match="takes pixels"):
            AttackStep(attack=attack, protocol=protocol)
        return
    step = choose_steps(attacks=[attack], protocol=protocol, quick=True)[0]
    short = {"cw": {"steps": 5, "search_steps": 1}, "spsa": {"steps": 1, "samples": 2}}
    step = dataclasses.replace(step, options={**step.options, **short.get(attack, {})})
    images, labels = digits[0][1500:1509], digits[1][1500:1509]
    entry = json.loads(json.dumps(measure_attack(convolutional, images, labels, step, batch_size=4)))
    assert entry["cases"] == 9
    bits = unpack_bits(entry["bits"], 9)
    assert bits.mean() == entry["accuracy"]
    if attack == "clean":
        assert (bits == (convolutional(images).argmax(1) == labels).numpy()).all()
    assert set(step.record()) <= set(entry)


def test_a_transferred_step_reads_the_gradient_of_the_source_and_the_classes_of_the_model(
    convolutional, linear, digits
):
    images, labels = digits[0][1500:1600], digits[1][1500:1600]
    step = AttackStep(attack="fgsm", eps=0.1, transferred=True)
    entry = measure_attack(convolutional, images, labels, step, source=linear)
    attack = make_attack("fgsm")
    moved = attack.perturb(linear, images, labels, 0.1, (0.0, 1.0))
    expected = convolutional(moved).argmax(1) == labels
    assert (unpack_bits(entry["bits"], 100) == expected.numpy()).all()


@pytest.mark.parametrize("name", [mechanism.name for mechanism in list_attention()])
def test_every_mechanism_has_a_gradient_to_attack(name):
    """FGSM moves nearly every pixel; a mechanism that cut the gradient would move none."""
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = VisionTransformer(
            8, 2, 5, attention=name, embed_dim=8, num_heads=2, num_layers=1, feedforward_dim=8, pooling="mean"
        ).eval()
    images = torch.rand(3, 3, 8, 8, generator=generator)
    labels = model(images).argmax(1).detach()
    model.requires_grad_(False)
    moved = make_attack("fgsm").perturb(model, images, labels, 1e-3, (-torch.inf, torch.inf))
    assert ((moved - images).abs() > 5e-4).double().mean() > 0.99
