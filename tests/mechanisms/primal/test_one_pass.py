"""The one-pass form of Primal-Attention gives the numbers of the formulas, whatever the slices and masks."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import kernel_attention as ka
from kernel_attention.mechanisms.primal import cpu as ops
from reference.primal import primal_attention as reference

F64 = torch.float64
OPTIONS = {
    "default": {},
    "data_independent": {"data_dependent": False},
    "identity": {"feature_map": "identity"},
    "per_sequence": {"square_per": "sequence"},
    "sum": {"objective_form": "sum"},
    "nested": {"objective_form": "nested"},
    "nested_data_independent": {"objective_form": "nested", "data_dependent": False},
    "no_bias": {"bias": False},
    "no_objective": {"eta": 0.0},
    "long_rank": {"rank": 19},
}
MASKS = {
    "none": None,
    "holes": [[1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], [1] * 11, [0] * 10 + [1]],
    "right": [[1] * 7 + [0] * 4, [1] * 11, [1] + [0] * 10],
}


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    """Slices of 4 tokens: the 11 of a sequence make two whole ones and a rest."""
    monkeypatch.setattr(ops, "_SLICE", 4)


def make_layer(num_heads: int = 3, **options) -> ka.PrimalAttention:
    torch.manual_seed(0)
    options = {"rank": 4, "rank_multiplier": 2, "eta": 0.3, "max_len": 11, "impl": "fused"} | options
    return ka.PrimalAttention(num_heads * 5, num_heads, **options).to(F64).train()


def run(
    layer: ka.PrimalAttention, x: Tensor, mask: Tensor | None, *, is_causal: bool = False
) -> dict[str, Tensor]:
    """Output at the real tokens, J, and the gradients of a fixed combination of both."""
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask, is_causal=is_causal)[real].double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    ((y * probe).sum() + ka.auxiliary_loss(layer)).backward()
    result = {"y": y, "x": x.grad[real]} | {name: p.grad for name, p in layer.named_parameters()}
    if layer.objective is not None:
        result["J"] = layer.objective
    return {name: value.detach().double() for name, value in result.items()}


@pytest.mark.parametrize("num_heads", [1, 2, 3])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_pass_equals_the_formulas(options, mask, num_heads):
    layer = make_layer(num_heads, **OPTIONS[options])
    x = torch.randn(3, 11, num_heads * 5, dtype=F64)
    mask = None if MASKS[mask] is None else torch.tensor(MASKS[mask], dtype=torch.bool)
    for is_causal in {False, not layer.data_dependent}:
        layer.impl = "fused"
        fused = run(layer, x, mask, is_causal=is_causal)
        layer.impl = "reference"
        torch.testing.assert_close(fused, run(layer, x, mask, is_causal=is_causal), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("num_heads", [2, 3])
def test_one_pass_equals_the_papers_loops(num_heads):
    layer = make_layer(num_heads)
    x = torch.randn(2, 11, num_heads * 5, dtype=F64)
    found = run(layer, x, None)
    weights = {name: p.detach().requires_grad_() for name, p in layer.named_parameters()}
    x = x.requires_grad_()
    result = reference(x, weights, num_heads=num_heads, num_rows=layer.num_rows)
    objective = result.objective("mean", "batch")
    y = result.y.flatten(0, 1)
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    ((y * probe).sum() + layer.eta * objective.square()).backward()
    expected = {"y": y, "x": x.grad.flatten(0, 1), "J": objective} | {n: w.grad for n, w in weights.items()}
    torch.testing.assert_close(found, {n: v.detach() for n, v in expected.items()}, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_is_as_near_to_float64_as_the_formulas(dtype, monkeypatch, built_engines):
    monkeypatch.setattr(ops, "_SLICE", 64)
    layer = make_layer(2)
    x = torch.randn(3, 1021, 10, dtype=F64)
    exact = run(layer, x, None)
    errors, engines = {}, ["fused", "native"] if dtype == torch.float32 else ["fused"]
    for impl in ("reference", *engines):
        layer.to(F64)
        rounded = make_layer(2, impl=impl).to(dtype)
        found = run(rounded, x.to(dtype), None)
        errors[impl] = {name: (found[name] - exact[name]).norm() / exact[name].norm() for name in exact}
    # A sum of n = 3,063 rows, taken one by one in float32, has partial sums of size sqrt(i) that round once
    # each: sqrt(n / 2) roundings of the whole. Which form has them depends on the processor's order.
    rounding = 4 * torch.finfo(dtype).eps + 3063**0.5 * torch.finfo(torch.float32).eps
    for engine in engines:
        for name, error in errors[engine].items():
            assert error < 2 * errors["reference"][name] + rounding, (engine, name)


def test_slices_of_any_size_give_the_same(monkeypatch):
    layer, x = make_layer(), torch.randn(5, 11, 15, dtype=F64)
    results = []
    for size in (1, 3, 11, 1000):  # parts of a sequence, or all of it
        monkeypatch.setattr(ops, "_SLICE", size)
        results.append(run(layer, x, None))
    for one, other in itertools.pairwise(results):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_what_padding_holds_reaches_no_gradient():
    layer, x = make_layer(), torch.randn(2, 11, 15, dtype=F64)
    mask = torch.tensor([[True] * 6 + [False] * 5, [True] * 11])
    clean = run(layer, x, mask)
    torch.testing.assert_close(run(layer, x.masked_fill(~mask[..., None], torch.nan), mask), clean)


def test_zero_tokens_pass_a_finite_gradient():
    layer = make_layer(bias=False)
    found = run(layer, torch.zeros(2, 11, 15, dtype=F64), None)
    assert all(value.isfinite().all() for value in found.values())


@pytest.mark.parametrize("data_dependent", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_nested_objective_forms_nothing_of_the_size_of_the_tokens(data_dependent):
    x = torch.randn(2, 997, 10, dtype=F64)  # a prime: no other size is 997 but that of the tokens
    counts = {}
    for name, eta in (("nested", 0.3), ("none", 0.0)):
        layer = make_layer(2, eta=eta, data_dependent=data_dependent, objective_form="nested")
        with TensorsOfLength(997) as made:
            y = layer(x)
        with made:
            (y.sum() + ka.auxiliary_loss(layer)).backward()
        counts[name] = made.count
    assert counts["nested"] == counts["none"] > 0


class TensorsOfLength(TorchDispatchMode):
    """Counts the results of a length that operators make."""

    def __init__(self, length: int) -> None:
        super().__init__()
        self.length, self.count = length, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.count += sum(
            self.length in result.shape for result in tree_leaves(results) if isinstance(result, Tensor)
        )
        return results


def test_the_gram_matrices_of_16_bit_features_accumulate_in_float32():
    x, eye = torch.randn(1, 300, 8, dtype=torch.bfloat16), torch.eye(8, dtype=torch.bfloat16)
    maps, constant = torch.ones(1, 1, 8, 1, dtype=x.dtype), torch.zeros(1)
    _, gram = ops.SLICES.token_pass.map_tokens(ops.Tokens(1, False, None), x, eye, None, maps, constant, True)
    halves = x[0].double().unflatten(-1, (2, 4)).transpose(0, 1)  # the features are the tokens
    torch.testing.assert_close(gram[0, 0].double(), halves.mT @ halves, rtol=1e-6, atol=300**0.5 * 1e-6)


def test_nothing_but_the_input_is_kept_for_the_backward_pass(monkeypatch):
    monkeypatch.setattr(ops, "_SLICE", 64)
    layer, x = make_layer(2), torch.randn(1, 4000, 10, dtype=F64)
    saved = {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        y = layer(x)
    assert y.shape == x.shape
    assert sum(saved.values()) < 1.1 * x.untyped_storage().nbytes()
