"""The pass of few launches gives the numbers of the formulas; here on a CPU, where it is not taken."""

from __future__ import annotations

import copy

import pytest
import torch

from kernel_attention import PrimalAttention
from kernel_attention.mechanisms.primal.causal_gpu import causal_primal_launches
from kernel_attention.mechanisms.primal.gpu import primal_launches

BATCH, LENGTH, HEADS, WIDTH = 3, 13, 2, 10


def _layer(**options):
    torch.manual_seed(0)
    layer = PrimalAttention(WIDTH, HEADS, dtype=torch.float64, **{"rank": 3, "rank_multiplier": 2, **options})
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer.train()


def _found(layer, x, mask, is_causal, by_pass):
    call = layer._call(x, mask, is_causal)
    if by_pass:
        y, energy, _ = primal_launches(call, call.samples())
    else:
        y, energy, _ = layer._reference(x, mask, is_causal)
        if energy is not None and call.total_energy:
            energy = energy.sum()
    return y, energy


@pytest.mark.parametrize("form", ["whole", "padded", "causal", "causal padded"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"rank_multiplier": 7},
        {"eta": 0.1},
        {"eta": 0.1, "square_per": "sequence"},
        {"eta": 0.1, "data_dependent": False},
        {"eta": 0.1, "feature_map": "identity", "bias": False},
    ],
)
def test_outputs_and_gradients_equal_those_of_the_formulas(options, form):
    is_causal = form.startswith("causal")
    layer = _layer(**{**options, **({"data_dependent": False} if is_causal else {})})
    x = torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.arange(LENGTH)[None] < torch.tensor([LENGTH, 4, 1])[:, None] if "padded" in form else None
    probe = torch.randn_like(x)
    probe = probe if mask is None else probe * mask[..., None]
    found = []
    for by_pass in (True, False):
        leaf = x.clone().requires_grad_()
        y, energy = _found(layer, leaf, mask, is_causal, by_pass)
        loss = (y * probe).sum()
        if energy is not None:
            loss = loss + (energy.square() * torch.linspace(1, 2, max(energy.numel(), 1))).sum()
        leaves = [leaf, *layer.parameters()]
        grads = torch.autograd.grad(loss, leaves, materialize_grads=True)
        found.append((y if mask is None else y[mask], energy, grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("length", [13, 300])
@pytest.mark.parametrize(
    "options", [{}, {"running_means": False}, {"feature_map": "identity", "bias": False}]
)
def test_the_causal_data_dependent_form_equals_the_formulas(options, length, padded):
    layer = _layer(max_len=length + 2, **{"rank": 7, "rank_multiplier": 3, **options})
    x = torch.randn(BATCH, length, WIDTH, dtype=torch.float64)
    mask = torch.arange(length)[None] < torch.tensor([length, 4, 1])[:, None] if padded else None
    probe = torch.randn_like(x)
    probe = probe if mask is None else probe * mask[..., None]
    found = []
    for by_pass in (True, False):
        leaf = x.clone().requires_grad_()
        if by_pass:
            y = causal_primal_launches(layer._call(leaf, mask, True)).y
        else:
            y = layer._reference(leaf, mask, True)[0]
        grads = torch.autograd.grad((y * probe).sum(), [leaf, *layer.parameters()], materialize_grads=True)
        found.append((y if mask is None else y[mask], *grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_the_gradient_can_be_differentiated():
    layer = _layer(eta=0.1)
    x = torch.randn(1, 5, WIDTH, dtype=torch.float64, requires_grad=True)

    def outputs(x):
        y, energy = _found(layer, x, None, False, True)
        return y.square().sum() + energy.square()

    torch.autograd.gradgradcheck(outputs, (x,))


@pytest.mark.parametrize("is_total", [True, False])
def test_in_16_bits_the_energy_and_its_gradients_are_those_of_the_rounded_weights(is_total):
    layer = _layer(eta=0.1, square_per="batch" if is_total else "sequence").bfloat16()
    x, found = torch.randn(BATCH, LENGTH, WIDTH).bfloat16(), []
    for each in (layer, copy.deepcopy(layer).double()):
        leaf = x.to(each.w_e.dtype).requires_grad_()
        _, energy = _found(each, leaf, None, False, True)
        leaves = [leaf, each.q_proj.weight, each.w_e, each.sqrt_lambda]
        found.append((energy, *torch.autograd.grad(energy.sum(), leaves)))
    for rounded, exact in zip(*found, strict=True):  # features, projections and each gradient: 2^-8 each
        assert (rounded.double() - exact).norm() < 2.0**-5 * exact.norm()
    assert found[0][0].dtype == torch.float32
