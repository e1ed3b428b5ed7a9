"""timm's ViT and DeiT: their weights in our vision transformer, and back; they train with our layers."""

from __future__ import annotations

import copy
import math
import os
import re
import tarfile
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from hosts.models_of_hosts import largest_difference, scatter
from torch.nn import functional as F

import kernel_attention as ka
from kernel_attention.hosts import load_timm_weights, timm_state_dict, vision_transformer_from_timm
from kernel_attention.models import VisionTransformer

_OUTSIDE = Path(os.environ.get("KERNEL_ATTENTION_DATA") or Path(__file__).parents[3] / "shared" / "data")
SIZES = {"img_size": (16, 24), "patch_size": 8, "depth": 3, "embed_dim": 14, "num_heads": 2}
OURS = {"embed_dim": 14, "num_heads": 2, "num_layers": 3, "feedforward_dim": 56}


def create(timm, name="vit_tiny_patch16_224", **options):
    torch.manual_seed(0)
    return scatter(timm.create_model(name, num_classes=5, **{**SIZES, **options})).eval()


def build(attention="softmax", **options) -> VisionTransformer:
    return VisionTransformer((16, 24), 8, 5, attention, **{**OURS, **options}).eval()


def normalised(host, images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(host.pretrained_cfg[key])[:, None, None] for key in ("mean", "std"))
    return (images - mean) / std


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "vit_tiny_patch16_224"])
def test_the_logits_are_those_of_timm(timm, name):
    """At full size, from its own start, each bias moved off zero."""
    torch.manual_seed(0)
    host = timm.create_model(name).eval()
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    images = torch.rand(2, 3, 224, 224)
    with torch.no_grad():
        expected = host(normalised(host, images))
        model = vision_transformer_from_timm(host)
        assert largest_difference(model(images), expected) < 1e-5
    assert (model.grid_size, model.max_len, model.head.out_features) == ((14, 14), 197, 1000)
    assert expected.std() > 0.1, "logits of one size could not tell models apart"


@pytest.mark.parametrize(
    "options", [{}, {"global_pool": "avg", "class_token": False, "fc_norm": False}], ids=["token", "avg"]
)
def test_weights_go_back_bit_for_bit(timm, options):
    host = create(timm, **options)
    model = vision_transformer_from_timm(host)
    state = timm_state_dict(model)
    assert {key: torch.equal(value, host.state_dict()[key]) for key, value in state.items()} == dict.fromkeys(
        host.state_dict(), True
    )
    images = torch.rand(3, 3, 16, 24)
    assert largest_difference(model(images), host(normalised(host, images))) < 1e-5
    other = copy.deepcopy(host)
    scatter(other, seed=1)
    other.load_state_dict(state)
    x = torch.randn(3, 3, 16, 24)
    assert torch.equal(other(x), host(x))


def test_gradients_and_features_are_those_of_timm(timm):
    host = create(timm).double()
    model = vision_transformer_from_timm(host)
    images = torch.rand(3, 3, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(model.encode(images), host.forward_features(normalised(host, images).double()))
    for each, x in ((model, images), (host, normalised(host, images).double())):
        F.cross_entropy(each(x), torch.tensor([4, 0, 1])).backward()
    weight = model.layers[1].attention.v_proj.weight
    torch.testing.assert_close(weight.grad, host.blocks[1].attn.qkv.weight.grad[28:])
    torch.testing.assert_close(model.class_token.grad, host.cls_token.grad[0, 0])


def test_resized_positions_are_those_of_timm(timm):
    host = create(timm)
    model = vision_transformer_from_timm(host).resized((40, 16))
    host.set_input_size((40, 16))
    torch.testing.assert_close(model.positions, host.pos_embed[0])
    images = torch.rand(3, 3, 40, 16)
    assert largest_difference(model(images), host(normalised(host, images))) < 1e-5


def test_another_mechanism_takes_the_projections_that_it_has(timm):
    host = create(timm)
    model = build(["symmetric", {"primal": {"rank": 3}}, {"scaled": {"scaling": "matrix"}}])
    scale = {"mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    loading = load_timm_weights(model, host.state_dict(), **scale)
    torch.testing.assert_close(model.input_std, torch.tensor(scale["std"]))
    q, _, v = host.blocks[0].attn.qkv.weight.chunk(3)
    assert torch.equal(model.layers[0].attention.q_proj.weight, q)
    assert torch.equal(model.layers[0].attention.v_proj.weight, v)
    assert torch.equal(model.layers[1].attention.k_proj.bias, host.blocks[1].attn.qkv.bias[14:28])
    assert {name for name in loading.dropped if name.endswith("weight")} == {
        "layers.0.attention.k_proj.weight",
        "layers.1.attention.v_proj.weight",
    }
    own = ["w_e", "w_r", "concat.weight", "concat.bias"]
    expected = {*(f"layers.1.attention.{name}" for name in own), "layers.2.attention.s"}
    assert set(loading.new) == expected


def test_a_classifier_of_other_classes_keeps_its_own_head(timm):
    host = create(timm)
    model = VisionTransformer((16, 24), 8, 11, **OURS)
    before = model.head.weight.clone()
    loading = load_timm_weights(model, host.state_dict(), head=False)
    assert loading.new == ("head.weight", "head.bias")
    assert torch.equal(model.head.weight, before)
    assert torch.equal(model.norm.weight, host.norm.weight)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("blocks.1.attn.qkv.bias"), "lacks blocks.1.attn.qkv.bias"),
        (lambda state: state.update({"blocks.0.ls1.gamma": torch.ones(14)}), "unknown blocks.0.ls1.gamma"),
        (
            lambda state: state.update(pos_embed=state["pos_embed"][:, 1:]),
            "pos_embed is (1, 6, 14), expected (1, 7, 14)",
        ),
        (
            lambda state: state.update({"head.weight": torch.zeros(9, 14)}),
            "head.weight is (9, 14), expected (5, 14)",
        ),
    ],
    ids=["missing", "unknown", "misshaped", "other classes"],
)
def test_keys_that_do_not_fit_are_named_and_nothing_is_loaded(timm, change, message):
    model = build()
    before = copy.deepcopy(model.state_dict())
    state = create(timm).state_dict()
    change(state)
    with pytest.raises(ka.InputError, match=re.escape(message)):
        load_timm_weights(model, state, mean=[0.5] * 3, std=[0.5] * 3)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_distilled_model_is_refused(timm):
    host = create(timm, "deit_tiny_distilled_patch16_224")
    for load in (vision_transformer_from_timm, lambda host: load_timm_weights(build(), host.state_dict())):
        with pytest.raises(ka.InputError, match="distilled DeiT has no counterpart"):
            load(host)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"act_layer": torch.nn.ReLU}, "expected GELU"),
        ({"norm_layer": torch.nn.LayerNorm}, "expected LayerNorm with eps=1e-06"),
        ({"global_pool": "avg", "fc_norm": False}, "global_pool='avg' with a class token"),
        ({"qkv_bias": False}, "lacks blocks.0.attn.qkv.bias"),
        ({"reg_tokens": 2}, "unknown reg_token"),
        ({"init_values": 1e-5}, "unknown blocks.0.ls1.gamma"),
    ],
    ids=str,
)
def test_a_model_that_computes_something_else_is_refused(timm, options, message):
    with pytest.raises(ka.InputError, match=re.escape(message)):
        vision_transformer_from_timm(create(timm, **options))


def test_a_model_of_another_kind_is_refused(timm):
    with pytest.raises(ka.InputError, match="ResNet is no ViT or DeiT classifier of timm"):
        vision_transformer_from_timm(timm.create_model("resnet10t"))


@pytest.mark.parametrize(
    ("attention", "named"),
    [
        ("symmetric", "layers.0.attention.k_proj"),
        (["softmax", "batch_norm", "rpc"], "layers.1 (batch_norm), layers.2 (rpc)"),
        ({"softmax": {"bias": False}}, "layers.0.attention.k_proj.bias"),
    ],
    ids=str,
)
def test_what_timm_has_no_name_for_is_not_written(attention, named):
    with pytest.raises(ka.InputError, match=re.escape(named)):
        timm_state_dict(build(attention))


@pytest.fixture(scope="module")
def photographs() -> tuple[torch.Tensor, torch.Tensor]:
    """Two test images of every class of CIFAR-10, (20, 3, 32, 32) in [0, 1], and their classes."""
    image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    archive = _OUTSIDE / "images" / "cifar10.tar.xz"
    if not archive.is_file():
        pytest.skip(f"{archive} is missing (set KERNEL_ATTENTION_DATA to the folder of real data)")
    found = defaultdict(list)
    with tarfile.open(archive, mode="r|*") as tar:
        for member in tar:
            split, *rest = Path(member.name).parts
            if member.isfile() and split == "test" and len(found[rest[0]]) < 2:
                with image.open(tar.extractfile(member)) as photograph:
                    found[rest[0]].append(photograph.tobytes())
            if len(found) == 10 and all(len(each) == 2 for each in found.values()):
                break
    photos = b"".join(photo for each in found.values() for photo in each)
    pixels = torch.frombuffer(bytearray(photos), dtype=torch.uint8)
    pixels = pixels.view(20, 32, 32, 3)
    return pixels.permute(0, 3, 1, 2) / 255, torch.arange(10).repeat_interleave(2)


@pytest.mark.slow
def test_deit_tiny_with_our_layers_learns_photographs_by_heart(timm, photographs):
    """64 tokens of 4 x 4 pixels; the twelve layers, the width and the heads are DeiT-tiny's."""
    torch.manual_seed(0)
    model = timm.create_model("deit_tiny_patch16_224", img_size=32, patch_size=4, num_classes=10)
    first, last = {"rpc": {"iterations": 4, "lam": 4.0}}, {"primal": {"rank": 20, "eta": 0.05}}
    ka.replace_attention(model, {0: first, -1: last})
    images, classes = (half[::2] for half in photographs)
    x = normalised(model, images)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(8):
        loss = F.cross_entropy(model(x), classes)
        losses.append(loss.item())
        optimizer.zero_grad()
        (loss + ka.auxiliary_loss(model)).backward()
        optimizer.step()
    assert losses[0] == pytest.approx(math.log(10), abs=0.5)
    assert losses[-1] < math.log(5)
