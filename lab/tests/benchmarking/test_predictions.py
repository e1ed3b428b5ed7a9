"""Predicted times of a GPU follow from counted work."""

from __future__ import annotations

import pytest

from kernel_attention_lab.benchmarking import Setting
from kernel_attention_lab.benchmarking.predictions import H100, predict


def test_softmax_attention_has_the_operations_of_its_products():
    batch, length, width = 4, 512, 64
    setting = Setting(length=length, embed_dim=width, num_heads=2, batch_size=batch, dtype="bfloat16")
    found = predict("sdpa", setting)
    projections = 3 * 8 * batch * length * width**2  # three passes of four maps
    scores = 4 * batch * length**2 * width
    assert found["operations"] == projections + 3.5 * scores  # the backward pass makes the weights again
    assert found["graph"] >= found["operations"] / H100.bfloat16 / H100.share
    causal = predict("sdpa", Setting(**setting.record() | {"is_causal": True}))
    assert causal["operations"] == projections + 3.5 * scores / 2


def test_small_layers_take_their_launches():
    setting = Setting(length=32, embed_dim=16, num_heads=2, batch_size=1, dtype="bfloat16")
    found = predict({"primal": {"rank": 4, "eta": 0.1}}, setting)
    launches = found["launches_forward"] + found["launches_backward"]
    assert found["eager"] == pytest.approx(launches * H100.launch, rel=0.05)
    assert found["compiled"] < found["graph"] < found["eager"]
