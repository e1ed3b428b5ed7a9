"""Whole models as contenders: any attention in their layers, their peers, and the tables."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.models import (
    CausalLanguageModel,
    SequenceClassifier,
    TokenClassifier,
    VisionTransformer,
)
from kernel_attention_lab.benchmarking import SUITES, Plan, Setting, find_contender
from kernel_attention_lab.benchmarking.layers import penalty
from kernel_attention_lab.benchmarking.operations import count_operations, count_parameters
from kernel_attention_lab.benchmarking.plans import BODIES, check_plan
from kernel_attention_lab.benchmarking.timing import layer_and_data
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.tasks.registry import make_recipe

TINY = Setting(length=5, embed_dim=12, num_heads=2, batch_size=3, body="vit")
TINY_IN = {
    body: Setting(
        length=4, embed_dim=12, num_heads=2, batch_size=3, body=body, is_causal=BODIES[body].is_causal
    )
    for body in BODIES
}
PRIMAL = {"primal": {"rank": 3, "eta": 0.5}}


@pytest.mark.parametrize(
    ("length", "grid", "class_tokens", "pixels", "patch"),
    [(197, 14, 1, 224, 16), (64, 8, 0, 32, 4), (65, 8, 1, 32, 4), (4, 2, 0, 8, 4)],
)
def test_the_length_says_the_images(length, grid, class_tokens, pixels, patch):
    setting = Setting(length=length, embed_dim=12, num_heads=2, batch_size=1, body="vit")
    assert (setting.grid_size, setting.class_tokens) == (grid, class_tokens)
    made = find_contender("symmetric").make(setting)
    assert made.input_size == (3, pixels, pixels)
    assert (made.model.patch_size, made.model.max_len) == (patch, length)
    assert made(torch.rand(1, 3, pixels, pixels)).shape == (1, 1000)


def test_a_list_has_one_attention_for_each_layer():
    contender = find_contender([PRIMAL, "symmetric", "symmetric", "sdpa"])
    assert contender.name == "primal (rank 3, eta 0.5) + 2 x symmetric + sdpa"
    made = contender.make(TINY).train()
    first, *_ = made.model.layers
    assert len(made.model.layers) == 4
    assert first.attention.max_len == 5
    made(torch.rand(3, 3, 8, 8)).sum().backward()
    torch.testing.assert_close(penalty(made), first.attention.penalty())
    assert penalty(made) > 0
    assert contender.reference(TINY).model.layers[0].attention.impl == "reference"


def test_the_operations_of_the_model_are_counted():
    """Softmax at d, N, 12 layers: 24 N d^2 + 4 N^2 d each, patches and head besides."""
    setting = Setting(length=65, embed_dim=24, num_heads=2, batch_size=2, body="vit")
    counted = count_operations(find_contender("softmax"), setting, ("forward",))
    layers = 12 * (24 * 65 * 24**2 + 4 * 65**2 * 24)
    assert counted["forward"] == 2 * (layers + 2 * 64 * 48 * 24 + 2 * 24 * 1000)


def test_what_has_no_place_is_told():
    only = "is measured with body vit only"
    assert find_contender("timm").absence(Setting()) == only
    assert find_contender("conv2d").absence(Setting()) == only
    whole = "is measured with body vit or series or tokens or language only"
    assert find_contender("no attention").absence(Setting()) == whole
    assert find_contender("nn.TransformerEncoderLayer").absence(Setting()) == whole
    assert find_contender("nystrom-attention").absence(TINY_IN["language"]) != ""
    given = {"conv2d": {"grid_size": [2, 4]}}
    assert find_contender(given).absence(Setting(length=8)) == ""
    with pytest.raises(InputError, match="'timm' is a whole model, not a layer"):
        find_contender(["softmax", "timm"])


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"length": (7,)}, "length=7 with body='vit'"),
        ({"is_causal": (True,)}, "is_causal=True with body='vit'"),
        ({"body": ("language",)}, "is_causal=False with body='language'"),
        ({"body": ("vits",)}, "accepted: language, layer, series, tokens, vit"),
    ],
)
def test_models_that_cannot_be(changed, told):
    plan = Plan(title="", contenders=("sdpa",), grid={"body": ("vit",), "length": (5,), **changed})
    with pytest.raises(InputError, match=re.escape(told)):
        check_plan(plan)


@pytest.mark.parametrize("name", ["vision", "rpc-vision", "series", "lra", "language"])
def test_every_contender_of_a_suite_trains(name):
    """With its heads and layers, on few tokens of few channels."""
    plan = SUITES[name]
    check_plan(plan)
    sizes = dataclasses.asdict(next(plan.settings())) | {"length": 16, "batch_size": 2}
    setting = Setting(**sizes | {"embed_dim": 16 * sizes["num_heads"]})
    for spec in plan.contenders:
        contender = find_contender(spec)
        if contender.absence(setting) or contender.name == "timm":
            continue
        layer, x, cotangent = layer_and_data(contender.make, setting)
        y = layer.train()(x)
        assert y.shape == cotangent.shape
        own = penalty(layer)
        loss = y.square().mean() if own is None else y.square().mean() + own
        loss.backward()
        assert all(each.grad.isfinite().all() for each in layer.parameters() if each.grad is not None)
        with torch.no_grad():
            assert layer.eval()(x).isfinite().all()


@pytest.mark.parametrize("body", BODIES)
def test_the_models_are_those_of_the_recipes(body):
    """A mechanism by name makes the model that the library makes with this mechanism, to the last bit."""
    setting, sizes = TINY_IN[body], BODIES[body]
    shared = {
        "embed_dim": 12, "num_heads": 2, "num_layers": sizes.num_layers, "dropout": sizes.dropout,
        "feedforward_dim": 12 * sizes.feedforward_factor,
    }  # fmt: skip
    if body != "vit":
        shared["norm_first"] = sizes.norm_first
    plain = {
        "vit": lambda: VisionTransformer(8, 4, 1000, "linear", pooling="mean", **shared),
        "series": lambda: SequenceClassifier(12, 9, 4, "linear", **shared),
        "tokens": lambda: TokenClassifier(256, 2, 4, "linear", **shared),
        "language": lambda: CausalLanguageModel(10_000, 4, "linear", **shared),
    }[body]()
    made, x, _ = layer_and_data(find_contender("linear").make, setting)
    model = made.model.model if body == "language" else made.model
    plain.load_state_dict(model.state_dict())
    expected = plain.eval()(x, last=1) if body == "language" else plain.eval()(x)
    torch.testing.assert_close(made.eval()(x), expected, rtol=0, atol=0)
    torch.manual_seed(1)
    trained = made.train()(x)
    if body == "language":
        torch.manual_seed(1)
        loss = plain.train().loss(x, x.roll(-1, dims=1))
        torch.testing.assert_close(trained, loss.expand(3), rtol=0, atol=0)


def test_recipes_have_the_sizes_of_the_models():
    for recipe, body in (("demo", "series"), ("lra/text", "tokens"), ("language/ptb_softmax", "language")):
        read, sizes = make_recipe(read_recipe(recipe)[1]), BODIES[body]
        assert (read.num_layers, read.dropout, read.norm_first) == (
            sizes.num_layers, sizes.dropout, sizes.norm_first,
        )  # fmt: skip
        assert read.feedforward_dim == sizes.feedforward_factor * read.embed_dim


@pytest.mark.parametrize("body", BODIES)
def test_pytorchs_layer_computes_what_ours_does(body):
    """With the same weights, in evaluation and float64."""
    setting = TINY_IN[body]
    theirs, x, _ = layer_and_data(find_contender("nn.TransformerEncoderLayer").make, setting)
    ours, theirs = find_contender("softmax").make(setting).double(), theirs.double()
    x = x.double() if x.is_floating_point() else x
    weights = {}
    for name, value in theirs.state_dict().items():
        if ".layer." not in name:
            weights[name] = value
            continue
        start, rest = name.split("layer.", 1)
        part, kind = rest.rsplit(".", 1)
        if part == "self_attn":
            for each, own in zip("qkv", value.chunk(3), strict=True):
                weights[f"{start}attention.{each}_proj.{kind.removeprefix('in_proj_')}"] = own
        elif part == "self_attn.out_proj":
            weights[f"{start}attention.out_proj.{kind}"] = value
        else:
            weights[start + rest] = value
    ours.load_state_dict(weights)
    torch.testing.assert_close(ours.eval()(x), theirs.eval()(x), rtol=1e-9, atol=1e-11)


def test_the_mechanism_has_the_models_dropout():
    dropouts = [
        find_contender(spec).make(TINY_IN["tokens"]).model.encoder.layers[0].attention.dropout
        for spec in ("softmax", {"softmax": {"dropout": 0.0}})
    ]
    assert dropouts == [0.1, 0.0]


def test_without_attention_a_model_has_fewer_parameters():
    for setting in TINY_IN.values():
        count = [count_parameters(find_contender(name), setting) for name in ("softmax", "no attention")]
        assert count[0] - count[1] == BODIES[setting.body].num_layers * 4 * 12 * 13
