"""Gradients in float32 against float64: as near as float32's roundings let them be, and finite.

The bound is u times the condition of the computation, u = 2^-24, and the condition is measured: the same
layer in float64 whose every operation is rounded at random (contracts.rounded). For softmax attention the
spread is about u L of the gradient, L = max ||q|| max ||k|| / sqrt(p): 1e-7 at inputs of size 1, 1e-3 at 1e2.
From L = 3e3 on the weights of the backward pass are made in float64, so that saturated attention, whose exact
gradient is that of the values alone, is right to the last digits again at 1e4.

Equal tokens round alike, so their errors add up as N where random ones add up as sqrt(N): the bound has that
factor sqrt(N) more for them.

Where the spread is as large as the gradient, float32 holds no digit of it. SATURATED says which mechanisms
that concerns, and why; the gradients are finite there too.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contracts.rounded import spread
from torch import Tensor

from kernel_attention import auxiliary_loss, create_attention, list_attention
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.mechanisms import get_mechanism

UNIT = 2.0**-24
SMALLEST = torch.finfo(torch.float32).tiny  # where every step and decay saturates, gradients are smaller
SIZES = ((32, 4, 32), (64, 4, 128))  # d, h, N
# These form all D-tuples of tokens, N^3 numbers a head: short sequences are what they are for.
SHORT = {"dual_multilinear": ((32, 4, 8), (64, 4, 12)), "tensor": ((32, 4, 8), (64, 4, 12))}
TOKENS = ("1", "1e2", "1e3", "1e4", "repeated", "constant")
QUICK = ((0, "1"), (0, "1e4"), (0, "repeated"))
SATURATED = {
    "rpc": "tokens that saturate at one value differ from it by less than their rounding, which then decides "
    "who wins the softmax of the next step; every step multiplies the gradient by L",
    "dual_multilinear": "saturated kernel tensors have equal singular values, whose vectors are not unique",
    "tensor": "the cubemax of products of three numbers saturates, and rounding decides the ties of triples",
}

# Beside the defaults of every mechanism: those whose objective has a gradient.
WITH_OBJECTIVE = {
    "primal-objective": ("primal", {"eta": 0.1}),
    "primal-identity": ("primal", {"eta": 0.1, "feature_map": "identity"}),
    "multilinear-objective": ("multilinear", {"eta": 0.1}),
}
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    **{mechanism.name: (mechanism.name, {}) for mechanism in list_attention()},
    **WITH_OBJECTIVE,
}


def _inputs() -> Iterator[Any]:
    for size, kind in itertools.product((0, 1), TOKENS):
        marks = () if (size, kind) in QUICK else pytest.mark.slow
        yield pytest.param(size, kind, id=f"{('small', 'common')[size]}-{kind}", marks=marks)


def build(name: str, embed_dim: int, heads: int, length: int) -> AttentionLayer:
    mechanism, options = LAYERS[name]
    required = {"tensor": {"max_len": length}, "conv2d": {"grid_size": (4, length // 4)}}
    mean = {"sample": False} if "sample" in get_mechanism(mechanism).options else {}
    layer = create_attention(mechanism, embed_dim, heads, **options, **mean, **required.get(mechanism, {}))
    with torch.no_grad():
        for parameter in layer.parameters():
            if not parameter.any():  # a zero would hide the gradients of what it multiplies
                parameter.copy_(0.1 * torch.randn_like(parameter))
    return layer


def tokens(kind: str, length: int, embed_dim: int) -> Tensor:
    x = torch.randn(1, length, embed_dim)
    if kind == "repeated":
        return x[:, :1].expand_as(x).clone()
    return torch.full_like(x, 3.0) if kind == "constant" else float(kind) * x


def gradients(layer: AttentionLayer, x: Tensor, towards: Tensor) -> list[Tensor]:
    leaf = x.clone().requires_grad_()
    total = (layer(leaf) * towards).sum() + auxiliary_loss(layer)
    return list(
        torch.autograd.grad(total, [leaf, *layer.parameters()], allow_unused=True, materialize_grads=True)
    )


@pytest.mark.parametrize(("size", "kind"), list(_inputs()))
@pytest.mark.parametrize("name", LAYERS)
def test_float32_gradients_are_off_by_their_roundings(name, size, kind):
    embed_dim, heads, length = SHORT.get(name, SIZES)[size]
    single = build(name, embed_dim, heads, length)
    double = copy.deepcopy(single).double()
    if hasattr(
        double, "impl"
    ):  # a fused form computes some things twice, which rounding at random tells apart
        double.impl = "reference"
    x, towards = tokens(kind, length, embed_dim), torch.randn(1, length, embed_dim)

    found = gradients(single, x, towards)
    assert all(value.isfinite().all() for value in found)
    may_saturate = name in SATURATED and kind in ("1e2", "1e3", "1e4")
    if may_saturate and size == 1:
        return  # the bound may be as large as the gradient, and takes seconds: the small size is compared

    def run() -> list[Tensor]:
        return gradients(double, x.double(), towards.double())

    exact = run()
    # Where rounding decides who wins a softmax, two draws may miss the rare large difference.
    radii = spread(run, exact, unit=UNIT, draws=16 if may_saturate else 2)
    alike = math.sqrt(length) if kind in ("repeated", "constant") else 1.0
    for label, value, wanted, radius in zip(
        ["x", *(n for n, _ in single.named_parameters())], found, exact, radii, strict=True
    ):
        off = (value.double() - wanted).norm().item()
        bound = 8 * alike * (radius + UNIT * wanted.norm().item()) + SMALLEST
        assert off <= bound, f"{label}: off by {off:.3g}, roundings explain {bound:.3g}"
    whole, far = (
        math.sqrt(sum(v * v for v in values)) for values in ([g.norm().item() for g in exact], radii)
    )
    assert far < 0.5 * whole or may_saturate, f"float32 moves a gradient of {whole:.3g} by {far:.3g}"


def test_every_exception_has_its_mechanism():
    assert set(SATURATED) <= set(LAYERS)
