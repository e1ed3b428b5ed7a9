"""Layers in float16, whose range ends at 65504: sums over many tokens and numbers over a small variance."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka

ERROR = 8 * 2.0**-11  # a few products, each rounded to 2^-11
LONG = 16384

OVER_LINEAR_KERNEL = {
    "linear": ("linear", {}),
    "relu": ("linear", {"feature_map": "relu"}),
    "softmax_plus": ("linear", {"feature_map": "softmax_plus"}),
    "cosine": ("cosine", {}),
    "scaled_heads": ("scaled_heads", {"kernel": "linear"}),
    "conv1d": ("conv1d", {"kernel": "linear"}),
    "batch_norm": ("batch_norm", {"kernel": "linear"}),
    "batch_norm, normalized": ("batch_norm", {"kernel": "linear", "normalize": True}),
    "values, rows": ("primal_values", {"feature_map": "elu", "normalize": "rows", "rank": 8}),
    "values, keys": ("primal_values", {"feature_map": "elu", "normalize": "keys", "rank": 8}),
    "values, output": ("primal_values", {"feature_map": "elu", "rank": 8}),
}
every_mode = pytest.mark.parametrize("mode", ["half", "autocast"])


def errors(name, options, mode, x, *, is_causal):
    """The relative error of every token."""
    torch.manual_seed(0)
    layer = ka.create_attention(name, x.size(2), 1, **options).eval().half()
    half = x.half()
    with torch.no_grad():
        exact = layer.double()(half.double(), is_causal=is_causal)
        if mode == "half":
            y = layer.half()(half, is_causal=is_causal)
        else:
            with torch.autocast("cpu", torch.float16):
                y = layer.float()(half.float(), is_causal=is_causal)
    return (y.double() - exact).norm(dim=-1) / exact.norm(dim=-1).amax()


@pytest.mark.parametrize(
    ("name", "mode"),
    [*((name, "half") for name in OVER_LINEAR_KERNEL), ("linear", "autocast"), ("values, rows", "autocast")],
)
def test_layers_over_the_linear_kernel_read_every_token_of_a_long_sequence(name, mode):
    name, options = OVER_LINEAR_KERNEL[name]
    torch.manual_seed(1)
    x = torch.randn(1, LONG, 32) + 2.0
    layer = ka.create_attention(name, 32, 1, **options)
    for is_causal in [False, True] if layer.supports(causal=True) else [False]:
        assert errors(name, options, mode, x, is_causal=is_causal).max() < ERROR


@every_mode
def test_decoding_goes_on_after_a_long_prompt(mode):
    torch.manual_seed(0)
    layer = ka.create_attention("linear", 32, 1).eval().half()
    x = (torch.randn(1, 4096, 32) + 2).half()
    dtype = torch.float16 if mode == "half" else torch.float32
    exact = layer.double()(x.double(), is_causal=True)[:, -1]
    layer = layer.to(dtype)
    with torch.autocast("cpu", torch.float16, enabled=mode == "autocast"):
        _, state = layer.prefill(x[:, :-1].to(dtype))
        y, _ = layer.step(x[:, -1].to(dtype), state)
    assert (y.double() - exact).norm() < ERROR * exact.norm()


@every_mode
def test_gradients_of_a_long_sequence_are_those_of_float64(mode):
    torch.manual_seed(0)
    x, found = torch.randn(1, LONG, 32).half(), []
    layer = ka.create_attention("linear", 32, 1).half()
    for dtype in (torch.float64, torch.float16 if mode == "half" else torch.float32):
        layer = layer.to(dtype)
        layer.zero_grad()
        with torch.autocast("cpu", torch.float16, enabled=mode == "autocast" and dtype == torch.float32):
            y = layer(x.to(dtype), is_causal=True)
        y.float().square().mean().mul(2.0**10).backward()
        found.append(layer.v_proj.weight.grad.double())
    assert (found[1] - found[0]).norm() < 4 * ERROR * found[0].norm()


@pytest.mark.parametrize("name", ["batch_norm", "batch_norm_scaled_heads"])
@pytest.mark.parametrize("kernel", ["softmax", "sparse"])
@every_mode
def test_a_prefix_without_variance_has_finite_outputs(name, kernel, mode):
    options = {"normalize": True, "kernel": kernel}
    torch.manual_seed(1)
    x = torch.randn(2, 40, 32)
    x[1, 1:9] = x[1, :1]  # a prefix of equal tokens
    for is_causal in (False, True):
        assert errors(name, options, mode, x, is_causal=is_causal).max() < 4 * ERROR
        assert errors(name, options, mode, x[:, :1], is_causal=is_causal).max() < 4 * ERROR
    layer = ka.create_attention(name, 32, 1, **options).eval().half()
    expected, state = layer(x.half(), is_causal=True), layer.initial_state(2)
    for token in range(3):
        y, state = layer.step(x[:, token].half(), state)
        torch.testing.assert_close(y, expected[:, token], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("normalize", ["output", "rows"])
def test_values_weighed_by_powers_of_large_inputs_are_finite(normalize):
    torch.manual_seed(0)
    layer = ka.create_attention("primal_values", 16, 2, feature_map="taylor", normalize=normalize).half()
    for scale in (1, 10, 30, 100):
        assert layer((scale * torch.randn(3, 12, 16)).half()).isfinite().all()
