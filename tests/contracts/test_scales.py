"""Layers that divide by a norm do not know the scale of their input, however small or large it is."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka

LAYERS = {
    "cosine": ("cosine", {}),
    "primal, data-independent": ("primal", {"rank": 3, "data_dependent": False, "impl": "plain"}),
    "primal, data-independent, fused": ("primal", {"rank": 3, "data_dependent": False, "impl": "fused"}),
    "primal": ("primal", {"rank": 3, "rank_multiplier": 2, "impl": "plain"}),
    "primal, fused": ("primal", {"rank": 3, "rank_multiplier": 2, "impl": "fused"}),
    "multilinear": ("multilinear", {"rank": 3, "impl": "plain"}),
    "multilinear, fused": ("multilinear", {"rank": 3, "impl": "fused"}),
    "multilinear, data-dependent": ("multilinear", {"rank": 3, "variant": "data_dependent", "impl": "plain"}),
    "multilinear, data-dependent, fused": (
        "multilinear", {"rank": 3, "variant": "data_dependent", "impl": "fused"}
    ),
}  # fmt: skip
# The outputs follow the values, or the rows that the weights are made of; the others stay.
FOLLOWING = (
    "cosine",
    "primal",
    "primal, fused",
    "multilinear, data-dependent",
    "multilinear, data-dependent, fused",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-66, -40, 40, 66])
@pytest.mark.parametrize("name", LAYERS)
def test_a_power_of_two_moves_no_digit(name, exponent, dtype):
    """2^66 is 7e19, whose square float32 cannot hold; 2^-66 is 1e-20, whose square it cannot hold either."""
    mechanism, options = LAYERS[name]
    torch.manual_seed(0)
    layer = ka.create_attention(mechanism, 15, 3, bias=False, **options).to(dtype)
    tokens = torch.randn(2, 41, 15, dtype=dtype)
    mask = torch.arange(41)[None] < torch.tensor([41, 30])[:, None]
    probe, results = torch.randn(2, 41, 15, dtype=dtype), []
    for scale in (1.0, 2.0**exponent):
        x = (scale * tokens).requires_grad_()
        y = layer(x, key_padding_mask=mask)
        (slope,) = torch.autograd.grad((y * probe)[mask].sum(), x)
        power = 1.0 if name in FOLLOWING else 0.0
        results.append((y[mask] * scale**-power, slope[mask] * scale ** (1 - power)))
    precision = torch.finfo(dtype).eps
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() < 8 * precision * wanted.norm()
        assert wanted.norm() > 0
