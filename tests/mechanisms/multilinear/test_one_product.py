"""A multilinear layer through the Gram matrix of its input gives the numbers of the formulas."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka

F64 = torch.float64
OPTIONS = {
    "standard": {},
    "diagonal": {"variant": "learnable_diagonal"},
    "learnable": {"variant": "learnable"},
    "data_dependent": {"variant": "data_dependent", "rank_multiplier": 2},
    "identity": {"feature_map": "identity", "objective_form": "mean"},
    "order_2": {"order": 2},
    "order_4": {"order": 4, "rank": 2},
    "core_cost": {"core": "cost", "eta_core": 0.2},
    "no_objective": {"eta": 0.0},
    "no_bias": {"bias": False},
}
MASKS = {
    "none": None,
    "holes": [[1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], [1] * 11, [0] * 10 + [1]],
    "right": [[1] * 7 + [0] * 4, [1] * 11, [1] + [0] * 10],
}


def run(layer, x, mask):
    """Output at the real tokens, J, and the gradients of a fixed combination of both."""
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    layer.zero_grad(set_to_none=True)
    y = layer(x, attention_mask=mask)[real].double()
    probe = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    ((y * probe).sum() + ka.auxiliary_loss(layer)).backward()
    result = {"y": y, "x": x.grad[real]} | {name: p.grad for name, p in layer.named_parameters()}
    if layer.objective is not None:
        result["J"] = layer.objective
    return {name: value.detach().double() for name, value in result.items() if value is not None}


def make_layer(**options):
    torch.manual_seed(0)
    return ka.MultilinearAttention(15, 3, **{"rank": 3, "eta": 0.3} | options).to(F64).train()


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("options", OPTIONS)
def test_one_product_equals_the_formulas(options, mask):
    layer = make_layer(**OPTIONS[options])
    x = torch.randn(3, 11, 15, dtype=F64)
    mask = None if MASKS[mask] is None else torch.tensor(MASKS[mask], dtype=torch.bool)
    results = {}
    for layer.impl in ("fused", "reference"):
        results[layer.impl] = run(layer, x, mask)
    torch.testing.assert_close(results["fused"], results["reference"], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_is_about_as_near_to_float64_as_the_formulas_in_that_precision(dtype):
    x = torch.randn(3, 200, 15, dtype=F64)
    exact = run(make_layer(impl="reference"), x, None)
    errors = {}
    for impl in ("reference", "fused"):
        found = run(make_layer(impl=impl).to(dtype), x.to(dtype), None)
        errors[impl] = {name: (found[name] - exact[name]).norm() / exact[name].norm() for name in exact}
    # The sums over 600 rows round as in tests/mechanisms/primal/test_one_pass.py.
    rounding = 8 * torch.finfo(dtype).eps + 600**0.5 * torch.finfo(torch.float32).eps
    for name, error in errors["fused"].items():
        assert error < 2 * errors["reference"][name] + rounding, name


def test_zero_tokens_and_hidden_nans_pass_finite_gradients():
    layer = make_layer(bias=False, impl="fused")
    assert all(
        value.isfinite().all() for value in run(layer, torch.zeros(2, 11, 15, dtype=F64), None).values()
    )
    x, mask = torch.randn(2, 11, 15, dtype=F64), torch.tensor([[True] * 6 + [False] * 5, [True] * 11])
    clean = run(layer, x, mask)
    torch.testing.assert_close(run(layer, x.masked_fill(~mask[..., None], torch.nan), mask), clean)


def blind_to_offsets(dtype, **options):
    """A layer whose projections take an offset common to all channels away, up to rounding."""
    layer = make_layer(**options).float()
    with torch.no_grad():
        for name, weight in layer.named_parameters():
            if name in ("q_proj.weight", "k_proj.weight", "f_proj.weight"):
                weight -= weight.mean(dim=1, keepdim=True)
    return layer.to(dtype)


@torch.no_grad()
def cancellation(layer, x):
    """By how much the projections shrink what they add up: || |X| |W_j|^T || / ||X W_j^T||, the largest."""
    worst = 0.0
    for weight, bias in layer.projections():
        for rows, own in zip(weight.split(layer.head_dim), bias.split(layer.head_dim), strict=True):
            added = (x.abs() @ rows.abs().mT).flatten(1).norm(dim=1)
            worst = max(worst, float((added / (x @ rows.mT + own).flatten(1).norm(dim=1)).max()))
    return worst


@pytest.mark.parametrize("offset", [0, 10, 100, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("options", ["standard", "data_dependent", "no_objective"])
def test_an_offset_of_all_tokens_costs_no_more_digits_than_the_projections_lose(options, offset):
    x = (torch.randn(2, 128, 15) + offset).double()
    exact_layer = blind_to_offsets(F64, impl="reference", **OPTIONS[options])
    exact = run(exact_layer, x, None)
    found = run(blind_to_offsets(torch.float32, impl="fused", **OPTIONS[options]), x.float(), None)
    # What is added up has d terms, whose roundings grow with sqrt(d); a gradient meets it twice.
    bound = 15**0.5 * torch.finfo(torch.float32).eps * cancellation(exact_layer, x)
    for name, value in exact.items():
        error = (found[name] - value).norm() / value.norm()
        assert error < 2 * bound + 1e-5, f"{name}: {error:.1e}, {bound:.1e}"
