"""The causal data-dependent layer in one pass gives the numbers of the formulas, and keeps little."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention.mechanisms.primal import causal_cpu, seen_rows

F64 = torch.float64
B, N = 3, 23
OPTIONS = {
    "default": {},
    "identity": {"feature_map": "identity"},
    "no_bias": {"bias": False},
    "no_running_means": {"running_means": False},
    "long_rank": {"rank": 19},
    "every_row": {"rank_multiplier": 40},  # every token is a row
    "longer_grid": {"max_len": 60},
}
MASKS = {
    "none": None,
    "holes": torch.arange(B * N).view(B, N) % 3 > 0,
    "right": torch.arange(N) < torch.tensor([[7], [23], [1]]),
}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """Blocks of 4 tokens, two of them a slice: of 23 tokens two slices, one block, and a rest."""
    monkeypatch.setattr(seen_rows, "block_tokens", lambda length, num_rows: 4)
    monkeypatch.setattr(causal_cpu, "_SLICE", 8)


def make(num_heads: int = 3, **options) -> ka.PrimalAttention:
    torch.manual_seed(0)
    options = {"rank": 4, "rank_multiplier": 2, "max_len": N, "impl": "fused", "dtype": F64} | options
    return ka.PrimalAttention(num_heads * 5, num_heads, **options).train()


def run(layer: ka.PrimalAttention, x: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Output at the real tokens, and the gradients of a fixed combination of it."""
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask, is_causal=True)[real].double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    (y * probe).sum().backward()
    found = {"y": y, "x": x.grad[real]} | {name: p.grad for name, p in layer.named_parameters()}
    return {name: value.detach().double() for name, value in found.items()}


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_pass_equals_the_formulas(options, mask, num_heads):
    layer, x = make(num_heads, **OPTIONS[options]), torch.randn(B, N, num_heads * 5, dtype=F64)
    fused = run(layer, x, MASKS[mask])
    layer.impl = "reference"
    torch.testing.assert_close(fused, run(layer, x, MASKS[mask]), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 3, 23, 1000])
def test_blocks_of_any_size_give_the_same(size, monkeypatch):
    layer, x = make(), torch.randn(B, N, 15, dtype=F64)
    expected = run(layer, x)
    monkeypatch.setattr(seen_rows, "block_tokens", lambda length, num_rows: size)
    torch.testing.assert_close(run(layer, x), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("bad", [1e30, torch.inf, torch.nan])
def test_no_bit_of_a_token_depends_on_later_ones(bad):
    layer, x = make().float(), torch.randn(B, N, 15)
    changed = x.clone()
    changed[:, 13:] = bad
    before, after = (layer(each, is_causal=True)[:, :13] for each in (x, changed))
    assert torch.equal(before, after)


def test_what_padding_holds_reaches_nothing():
    layer, x, mask = make(), torch.randn(B, N, 15, dtype=F64), MASKS["holes"]
    clean = run(layer, x, mask)
    torch.testing.assert_close(run(layer, x.masked_fill(~mask[..., None], torch.nan), mask), clean)


@pytest.mark.parametrize("mask", MASKS)
def test_second_derivatives_equal_those_of_the_formulas(mask):
    found = []
    for impl in ("fused", "reference"):
        layer, x = make(2, impl=impl), torch.randn(B, N, 10, dtype=F64).requires_grad_()
        real = torch.ones(B, N, dtype=torch.bool) if MASKS[mask] is None else MASKS[mask]
        inputs = [x, *layer.parameters()]
        y = layer(x, attention_mask=MASKS[mask], is_causal=True)[real]
        grads = torch.autograd.grad(y.sin().sum(), inputs, create_graph=True)
        total = sum(grad.square().sum() for grad in grads)
        found.append([*grads, *torch.autograd.grad(total, inputs, allow_unused=True)])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_as_near_to_float64_as_the_formulas_in_that_precision(dtype):
    x = torch.randn(B, 300, 10, dtype=F64)
    exact = run(make(2, max_len=300), x)
    errors = {}
    for impl in ("fused", "reference"):
        found = run(make(2, max_len=300, impl=impl).to(dtype), x.to(dtype))
        errors[impl] = {name: (found[name] - exact[name]).norm() / exact[name].norm() for name in exact}
    # As in test_one_pass.py: where n = 900 rows are summed one by one in float32, sqrt(n) roundings.
    rounding = 4 * torch.finfo(dtype).eps + 900**0.5 * torch.finfo(torch.float32).eps
    for name, error in errors["fused"].items():
        assert error < 2 * errors["reference"][name] + rounding, name


def test_transforms_and_compilers_take_the_formulas():
    layer, x = make(2, impl="auto", max_len=512), torch.randn(B, 512, 10, dtype=F64)
    assert layer.plan(x, is_causal=True).engine == "fused"
    assert layer.plan(x, is_causal=True, compiled=True).engine == "reference"
    assert layer.plan(x.to("meta"), is_causal=True).engine == "fused"  # an accelerator has a form of its own
    assert layer.plan(x[:, :511], is_causal=True).engine == "reference"
    layer.eta = 0.3
    layer.register_parameter("sqrt_lambda", torch.nn.Parameter(torch.ones(2, 4, dtype=F64)))
    assert layer.plan(x, is_causal=True).engine == "reference"
    assert layer.eval().plan(x, is_causal=True).engine == "fused"


def test_little_but_the_tokens_is_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(seen_rows, "block_tokens", lambda length, num_rows: 256)
    saved = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    layer, x = make(2, max_len=20000), torch.randn(1, 20000, 10, dtype=F64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, is_causal=True)
    # The mean of the prefixes, its counts, and what the output projection reads.
    assert sum(saved.values()) < 2.5 * x.untyped_storage().nbytes()
