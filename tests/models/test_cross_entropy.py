"""The sliced cross-entropy is PyTorch's, its gradients too, whatever the slices."""

from __future__ import annotations

import pytest
import torch
from models.test_causal import VOCABULARY, small
from torch.nn import functional as F

import kernel_attention.models.language.cross_entropy as module
from kernel_attention.errors import InputError
from kernel_attention.models.language.cross_entropy import linear_cross_entropy

TOKENS, WIDTH, WORDS = 17, 5, 11


@pytest.fixture
def parts():
    x, weight, bias = torch.randn(TOKENS, WIDTH), 3 * torch.randn(WORDS, WIDTH), torch.randn(WORDS)
    targets = torch.randint(WORDS, (TOKENS,))
    targets[[0, 5, TOKENS - 1]] = -100
    return *(one.double().requires_grad_() for one in (x, weight, bias)), targets


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_loss_and_gradients(parts, rows, monkeypatch):
    monkeypatch.setattr(module, "_SLICE_NUMBERS", rows * WORDS)
    *inputs, targets = parts
    found = linear_cross_entropy(*inputs, targets)
    expected = F.cross_entropy(F.linear(*inputs), targets)
    torch.testing.assert_close(found, expected, rtol=1e-13, atol=0)
    scaled = [torch.autograd.grad(0.3 * loss, inputs) for loss in (found, expected)]
    torch.testing.assert_close(*scaled, rtol=1e-11, atol=1e-14)


def test_no_gradients_where_none_are_wanted(parts):
    *inputs, targets = parts
    with torch.no_grad():
        assert not linear_cross_entropy(*inputs, targets).requires_grad


def test_no_target_counts(parts):
    *inputs, targets = parts
    loss = linear_cross_entropy(*inputs, torch.full_like(targets, -100))
    assert loss.item() == 0.0
    assert not any(grad.any() for grad in torch.autograd.grad(loss, inputs))


def test_large_logits_are_finite(parts):
    x, weight, bias, targets = parts
    loss = linear_cross_entropy(1e4 * x, weight, bias, targets)
    assert loss.isfinite()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(loss, (x, weight)))


def test_half_precision_is_as_exact_as_pytorch_s(parts):
    """Under autocast: the error against float64 is within twice that of the plain form."""
    *inputs, targets = parts
    exact = torch.autograd.grad(F.cross_entropy(F.linear(*inputs), targets), inputs)
    single = [one.detach().float().requires_grad_() for one in inputs]
    with torch.autocast("cpu", torch.bfloat16):
        losses = (linear_cross_entropy(*single, targets), F.cross_entropy(F.linear(*single).float(), targets))
    assert losses[0].dtype == torch.float32
    for place in range(3):
        errors = [
            (torch.autograd.grad(loss, single, retain_graph=True)[place] - exact[place]).norm()
            for loss in losses
        ]
        assert errors[0] <= 2 * errors[1] + 1e-6


@pytest.mark.parametrize("tied", [True, False])
def test_the_model_s_loss_is_that_of_its_logits(tied):
    model = small(tied=tied)
    tokens, targets = torch.randint(VOCABULARY, (2, 3, 8))
    losses = (model.loss(tokens, targets), F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()))
    gradients = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients)


def test_shapes_that_do_not_fit(parts):
    x, weight, bias, targets = parts
    with pytest.raises(InputError, match="must be"):
        linear_cross_entropy(x, weight, bias[1:], targets)
