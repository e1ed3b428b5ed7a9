"""Drawn calls of ridge and delta attention in 16 and 32 bits against float64: finite, and as near as derived.

Rounding of relative size u in the sums A and H moves the solution of A W = H, and the gradients, which are
products with A^-1, by up to u kappa of their size, kappa = 1 + tr(sum) / lambda; keys have length 1, so that
tr(sum) is their number n. A step of the delta rule makes no difference larger, so that n of them move a
result by u n at most. Inputs and results of bfloat16 are rounded once more, by 2^-9 of their size. Where the
bound is as large as the result there is nothing to compare, and the numbers are finite all the same.
"""

from __future__ import annotations

import contextlib
import random

import pytest
import torch
from torch import Tensor

from kernel_attention.functional import delta_attention, ridge_attention

CASES, BLOCKS = 5_000, 20
UNIT, COARSE = 2.0**-24, 2.0**-9
SMALLEST = torch.finfo(torch.float32).tiny
FACTOR = 16  # a product, a factorisation and two substitutions, each way


def draw_keys(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """Keys at random, a few of them repeated, all alike, nearly alike, in two directions, or partly zero."""
    k = torch.randn(shape, dtype=torch.float64)
    kind = rng.choice(["random", "random", "few", "repeated", "near", "flat", "zeros", "large"])
    if kind == "few":
        k = k[:, :, torch.randint(0, min(5, shape[2]), (shape[2],))]
    elif kind == "repeated":
        k = k[:, :, :1].expand(shape).clone()
    elif kind == "near":
        k = k[:, :, :1] + 10 ** rng.uniform(-5, -1) * k
    elif kind == "flat":
        k[..., 2:] = 0.0
    elif kind == "zeros":
        k = k * (torch.rand(shape[:3]) < rng.choice([0.0, 0.5, 0.9]))[..., None]
    elif kind == "large":
        k = k * 10 ** rng.uniform(-6, 6)
    return k


def run(seed: int) -> tuple[float, bool]:
    """The largest error of a result in units of its bound, and whether the bound says anything."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    name = rng.choice(["ridge", "ridge", "delta", "gated_delta"])
    length = int(2 ** rng.uniform(0, 12))
    shape = (1, rng.randint(1, 2), length, rng.choice([1, 2, 5, 8, 16]))
    k = draw_keys(rng, shape)
    q = k.roll(1, dims=2) if rng.random() < 0.3 else torch.randn_like(k)
    v = torch.randn_like(k)
    form: dict[str, object] = {"is_causal": rng.random() < 0.7}
    if rng.random() < 0.2:
        form["attention_mask"] = torch.arange(length)[None] < rng.randint(0, length)
    low = torch.bfloat16 if rng.random() < 0.3 else torch.float32
    q, k, v = (x.to(low) for x in (q, k, v))
    if name == "ridge":
        lam = 10 ** rng.uniform(-6, 3)
        further = [torch.full(shape[1:2], lam, dtype=torch.float32)]
        if rng.random() < 0.2:
            form["forgetting"] = torch.full(shape[1:2], rng.choice([0.91, 0.97, 0.999]))
        condition = 1 + length / lam
        if "forgetting" in form:
            gamma = float(form["forgetting"][0])
            condition = 1 + length / (lam * gamma**length)
    else:
        lam = 1.0
        further = [torch.rand(shape[:3]) if rng.random() < 0.7 else torch.ones(shape[:3])]
        if name == "gated_delta":
            further.append(10 ** rng.uniform(-3, 2) * -torch.rand(shape[:3]))
        condition = float(length)
    towards = torch.randn(v.shape).to(low)

    def results(dtype: torch.dtype) -> list[Tensor]:
        lowest = dtype == torch.bfloat16
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        exact = torch.float32 if lowest else dtype
        leaves += [x.detach().to(exact).requires_grad_() for x in further]
        options = {key: x.to(exact) if key == "forgetting" else x for key, x in form.items()}
        attend = ridge_attention if name == "ridge" else delta_attention
        mode = torch.autocast("cpu", torch.bfloat16) if lowest else contextlib.nullcontext()
        with mode:
            y = attend(*leaves, **options)
        found = torch.autograd.grad(y, leaves, towards.to(y.dtype), materialize_grads=True)
        return [x.detach().double() for x in (y, *found)]

    found, wanted = results(low), results(torch.float64)
    assert all(x.isfinite().all() for x in found), f"seed {seed}: {name} {shape} {low} is not finite"
    bound = FACTOR * UNIT * condition
    share = bound + (FACTOR * COARSE if low == torch.bfloat16 else 0.0)
    if bound > 0.5:
        return 0.0, False
    # Where a result cancels (a query at right angles to a key, say), its terms have a size still.
    largest = v.double().norm(dim=-1).max().item()
    size = largest * towards.double().norm().item()
    per_length = [1 / x.double().norm(dim=-1) for x in (q, k)]
    per_length = [x.masked_fill(x.isinf(), 0.0).max().item() for x in per_length]
    terms = [
        largest * length / (length + lam),
        *(size * x for x in per_length),
        towards.double().norm().item(),
    ]
    terms += [size / lam if name == "ridge" else size] * len(further)
    offs = [
        (one - two).norm().item() / (share * (two.norm().item() + term) + SMALLEST)
        for one, two, term in zip(found, wanted, terms, strict=True)
    ]
    return max(offs), True


@pytest.mark.slow
@pytest.mark.parametrize("block", range(BLOCKS))
def test_drawn_calls_are_finite_and_near(block):
    far = {seed: run(seed)[0] for seed in range(block, CASES, BLOCKS)}
    assert {seed: off for seed, off in far.items() if off > 1} == {}


def test_a_sample_of_the_drawn_calls():
    results = [run(seed) for seed in range(CASES, CASES + 60)]
    assert max(off for off, _ in results) <= 1
    assert sum(compared for _, compared in results) > 30
