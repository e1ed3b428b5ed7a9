"""Weights of every mechanism that commit 4ea74c81 saved give the outputs that they gave then."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

import kernel_attention as ka

FILE = Path(__file__).parents[1] / "fixtures" / "layers.safetensors"
with safe_open(FILE, "pt") as file:
    OPTIONS = json.loads(file.metadata()["options"])


@pytest.mark.parametrize("name", OPTIONS)
def test_weights_of_an_earlier_release_give_its_outputs(name):
    """In float64, so that only the order of sums may differ: 1e-12 of outputs that are near 1."""
    with safe_open(FILE, "pt") as file:
        saved = {
            key.removeprefix(f"{name}/"): file.get_tensor(key)
            for key in file.keys()  # noqa: SIM118
            if key.startswith(f"{name}/")
        }
    x, expected = saved.pop("/x"), saved.pop("/y")
    layer = ka.create_attention(name, embed_dim=x.size(-1), num_heads=2, **OPTIONS[name])
    layer.load_state_dict(saved)
    found = layer.double().eval()(x.double())
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12 * expected.abs().max().item())
