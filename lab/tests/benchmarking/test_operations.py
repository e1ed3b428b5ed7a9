"""Operations against counts by hand; a multiplication and an addition are two."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernel_attention as ka
from kernel_attention.mechanisms.primal.one_pass import primal_numbers, primal_operations
from kernel_attention_lab.benchmarking import Setting, find_contender
from kernel_attention_lab.benchmarking.contenders import Contender
from kernel_attention_lab.benchmarking.machine import roofline
from kernel_attention_lab.benchmarking.operations import count_operations, operation_counter
from kernel_attention_lab.benchmarking.timing import step

PASSES = ("forward", "step")
SETTING = Setting(length=96, embed_dim=24, num_heads=2, batch_size=3)


def softmax_by_hand(setting, share=1.0, pooled=1.0):
    """Four projections, of which keys and values of ``pooled`` of the rows; q k^T and A v of ``share``."""
    d, n = setting.embed_dim, setting.length
    return setting.batch_size * (2 * n * d * d * (2 + 2 * pooled) + 4 * n * n * d * share)


@pytest.mark.parametrize("name", ["sdpa", "eager", "softmax"])
def test_softmax(name):
    counted = count_operations(find_contender(name), SETTING, PASSES)
    assert counted["forward"] == softmax_by_hand(SETTING)
    assert counted["step"] == 3 * counted["forward"], "each product has two gradients"


@pytest.mark.parametrize(
    "spec", ["eager scaled_heads", {"batch_norm_scaled_heads": {"factors": [1, 2]}}], ids=str
)
def test_scaled_heads(spec):
    """One head of two at half the keys: 3/4 of the products, and ours projects pooled rows only."""
    counted = count_operations(find_contender(spec), SETTING, PASSES)
    pooled = 1.0 if isinstance(spec, str) else 0.75
    assert counted["forward"] == softmax_by_hand(SETTING, 0.75, pooled)


def test_figure_1_of_the_paper():
    """d 64, N 4096: operations fall by 24.6 % in training and inference."""
    setting = Setting(length=4096, batch_size=1)
    spec = {"batch_norm_scaled_heads": {"factors": [1, 2]}}
    ours, softmax = (count_operations(find_contender(name), setting, PASSES) for name in (spec, "eager"))
    for kind in PASSES:
        assert round(100 * (ours[kind] / softmax[kind] - 1), 1) == -24.6


@pytest.mark.parametrize("num_heads", [1, 2, 4])
@pytest.mark.parametrize("objective", [False, True])
def test_fused_primal_per_token(num_heads, objective):
    """What the fused layer really multiplies, in the products the counter sees, per token more."""
    layer = ka.PrimalAttention(
        32, num_heads, rank=3, eta=0.1 if objective else 0.0, rank_multiplier=2, impl="fused"
    )

    def counted(length, training):
        x, cotangent = torch.randn(1, length, 32, requires_grad=True), torch.randn(1, length, 32)
        with operation_counter() as counter:
            if training:
                step(layer.train(), x, cotangent)
            else:
                with torch.no_grad():
                    layer.eval()(x)
        return counter.get_total_flops()

    for training in (False, True):
        found = counted(3072, training) - counted(2048, training)
        by_hand = primal_operations(32, num_heads, objective=objective, training=training)
        assert found == 1024 * by_hand


def test_fused_layers_are_counted_in_the_reference_form():
    counted = count_operations(find_contender({"primal": {"rank": 3}}), SETTING, PASSES)
    d, p, n, b = SETTING.embed_dim, SETTING.embed_dim // 2, SETTING.length, SETTING.batch_size
    rows = 30  # f(X): rank 3, multiplier 10
    by_hand = 3 * 2 * n * d * d  # q, k and the output projection
    by_hand += 2 * 2 * 2 * rows * p * 3  # two heads, two sides: f(X)^T W
    by_hand += 2 * 2 * 2 * n * p * 3 + 2 * 2 * n * 6 * p  # scores, and the concatenation's map
    assert counted["forward"] == b * by_hand
    assert counted["how"] == "reference form, sizes alone"


def test_what_needs_values_is_counted_on_real_tokens():
    class Sorted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.map = torch.nn.Linear(24, 24)

        def forward(self, x):
            return self.map(x) * (1.0 if x.detach().sum().item() > 0 else 2.0)

    contender = Contender("s", lambda setting: Sorted())
    counted = count_operations(contender, SETTING, PASSES)
    assert counted == {"forward": 331776, "step": 3 * 331776, "how": "as it is, real tokens"}
    assert 2 * SETTING.tokens * 24**2 == 331776
    long = dataclasses.replace(SETTING, length=100_000)
    assert count_operations(contender, long, PASSES) == {"how": "not counted: needs real tokens"}


def test_counting_draws_no_random_numbers():
    before = torch.get_rng_state()
    count_operations(find_contender("sdpa"), SETTING, PASSES)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_roofline_is_the_slower_of_two_ceilings():
    setting = Setting(length=1000, batch_size=1, embed_dim=64, num_heads=2)
    ceilings = {"slice_product": 1e9, "copy": 1e12, "large_product": 2e9}
    (row,) = roofline(setting, ceilings, {"step": 1.0}, ka.PrimalAttention(64, 2, eta=0.1))
    assert row["operations"] == 1000 * (28 * 64**2 + 8 * 64 * 32)
    assert row["bytes"] == 1000 * 5 * 64 * 4 == 4 * 1000 * primal_numbers(64, training=True)
    assert row["share"] == row["operations"] / 1e9 / 1.0
    assert row["copy_share"] == row["bytes"] / 1e12
    (row,) = roofline(setting, {**ceilings, "copy": 1e6}, {"forward": 4.0}, ka.PrimalAttention(64, 2))
    assert row["share"] == row["copy_share"] == 1000 * 2 * 64 * 4 / 1e6 / 4.0


@pytest.mark.parametrize("layer", [ka.SoftmaxAttention(64, 2), ka.PrimalAttention(64, 2, impl="reference")])
def test_a_layer_whose_work_is_not_counted_has_no_roofline(layer):
    ceilings = {"slice_product": 1e9, "copy": 1e12, "large_product": 2e9}
    assert roofline(Setting(), ceilings, {"step": 1.0, "forward": 1.0}, layer) == []
