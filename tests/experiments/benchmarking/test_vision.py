"""Vision transformers as contenders: any attention in their layers, timm's beside them, and the tables."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

import kernel_attention as ka
from kernel_attention.errors import InputError
from kernel_attention.experiments.benchmarking import SUITES, Plan, Setting, find_contender, run_benchmark
from kernel_attention.experiments.benchmarking.layers import penalty
from kernel_attention.experiments.benchmarking.operations import count_operations, count_parameters
from kernel_attention.experiments.benchmarking.plans import check_plan
from kernel_attention.experiments.reporting.benchmark_tables import benchmark_markdown
from kernel_attention.models import VisionTransformer

TINY = Setting(length=5, embed_dim=12, num_heads=2, batch_size=3, body="vit")
PLUGIN = Path(__file__).parents[3] / "benchmarks" / "timm_beside_cpu_torch.py"
PRIMAL = {"primal": {"rank": 3, "eta": 0.5}}


@pytest.fixture
def timm():
    runpy.run_path(str(PLUGIN))
    pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ModuleNotFoundError)
    return pytest.importorskip("timm", reason="timm is not installed")


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


def test_a_mechanism_is_the_attention_of_every_layer():
    """With its token grid, and without any other change to the model."""
    made = find_contender("conv2d").make(TINY).eval()
    attentions = [layer.attention for layer in made.model.layers]
    assert len(attentions) == 12
    assert {(each.convolution.grid_size, each.convolution.class_tokens) for each in attentions} == {
        ((2, 2), 1)
    }
    plain = VisionTransformer(
        8, 4, 1000, "conv2d", embed_dim=12, num_heads=2, num_layers=12, feedforward_dim=48
    ).eval()
    plain.load_state_dict(made.model.state_dict())
    x = torch.rand(3, 3, 8, 8)
    torch.testing.assert_close(made(x), plain(x), rtol=0, atol=0)


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


def test_timm_has_its_place_beside_ours(timm):
    for length in (4, 5):
        setting = Setting(length=length, embed_dim=12, num_heads=2, body="vit")
        ours, theirs = (find_contender(name).make(setting).eval() for name in ("softmax", "timm"))
        assert ours.input_size == theirs.input_size
        from_theirs = ka.hosts.vision_transformer_from_timm(theirs.model)
        from_theirs.set_scale([0.0] * 3, [1.0] * 3)
        x = torch.rand(3, *ours.input_size)
        torch.testing.assert_close(from_theirs.eval()(x), theirs(x), rtol=1e-5, atol=1e-5)
        assert set(from_theirs.state_dict()) == set(ours.model.state_dict())
        assert count_parameters(find_contender("timm"), setting) == count_parameters(
            find_contender("softmax"), setting
        )


def test_the_operations_of_the_model_are_counted():
    """Softmax at d, N, 12 layers: 24 N d^2 + 4 N^2 d each, patches and head besides."""
    setting = Setting(length=65, embed_dim=24, num_heads=2, batch_size=2, body="vit")
    counted = count_operations(find_contender("softmax"), setting, ("forward",))
    layers = 12 * (24 * 65 * 24**2 + 4 * 65**2 * 24)
    assert counted["forward"] == 2 * (layers + 2 * 64 * 48 * 24 + 2 * 24 * 1000)


def test_what_has_no_place_is_told():
    assert find_contender("timm").absence(Setting()) == "has its place in a plan of vision transformers"
    assert find_contender("conv2d").absence(Setting()) == "has its place in a plan of vision transformers"
    given = {"conv2d": {"grid_size": [2, 4]}}
    assert find_contender(given).absence(Setting(length=8)) == ""
    with pytest.raises(InputError, match="'timm' is a whole model, not a layer"):
        find_contender(["softmax", "timm"])


@pytest.mark.parametrize("changed", [{"length": (7,)}, {"is_causal": (True,)}, {"body": ("vits",)}])
def test_images_that_cannot_be(changed):
    plan = Plan(title="", contenders=("sdpa",), grid={"body": ("vit",), "length": (5,), **changed})
    with pytest.raises(InputError, match="body"):
        check_plan(plan)


@pytest.mark.parametrize("name", ["vision", "rpc-vision"])
def test_every_contender_of_a_suite_trains(name):
    """With its heads and layers, on images of 2 x 2 patches and a class token."""
    setting = Setting(length=5, embed_dim=24, num_heads=3, batch_size=2, body="vit")
    check_plan(SUITES[name])
    for spec in SUITES[name].contenders:
        contender = find_contender(spec)
        if contender.name != "timm":
            made = contender.make(setting)
            loss = made(torch.rand(2, 3, 8, 8)).square().mean()
            own = penalty(made)
            (loss if own is None else loss + own).backward()
            assert all(each.grad.isfinite().all() for each in made.parameters() if each.grad is not None)
            assert len(made.model.layers) == 12


def test_the_tables_show_images_a_second_and_parameters():
    plan = Plan(
        title="tiny", contenders=(["symmetric"] * 2,), baseline="", rounds=2, flops=False,
        grid={"body": ("vit",), "length": (5,), "embed_dim": (12,), "num_heads": (2,), "batch_size": (3,)},
    )  # fmt: skip
    record = run_benchmark(plan)
    ((row,),) = (cell["rows"] for cell in record["cells"])
    assert set(row["memory"]) == {"forward", "step", "how"}
    lines = benchmark_markdown(record).splitlines()
    head = "| contender | N | ms | quartiles | images/s | peak, MB | parameters, M |"
    assert lines.count(head) == 2
    shown = [line for line in lines if line.startswith("| 2 x symmetric |")]
    for kind, line in zip(("forward", "step"), shown, strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        assert cells[:2] == ["2 x symmetric", "5"]
        assert float(cells[4]) == pytest.approx(3 / row["time"][kind]["median"], rel=0.01)
        assert float(cells[6]) == pytest.approx(row["parameters"] / 1e6, rel=0.05)
