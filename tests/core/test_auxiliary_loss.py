"""auxiliary_loss: sum over the layers of eta J^2."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from kernel_attention import InputError, PrimalAttention, SoftmaxAttention, auxiliary_loss


def layers(*etas: float) -> nn.Sequential:
    return nn.Sequential(*(PrimalAttention(6, 2, rank=2, eta=eta) for eta in etas), SoftmaxAttention(6, 2))


def test_it_is_the_sum_of_eta_times_the_square_of_every_layers_objective():
    model = layers(0.1, 0.0, 0.7)
    model(torch.randn(3, 5, 6))
    first, second = model[0].objective, model[2].objective
    expected = 0.1 * first**2 + 0.7 * second**2
    torch.testing.assert_close(auxiliary_loss(model), expected)
    torch.testing.assert_close(auxiliary_loss(model, "mean"), expected / 2)


def test_eta_may_be_changed_between_steps():
    model = layers(0.1)
    model(torch.randn(3, 5, 6))
    before = auxiliary_loss(model)
    model[0].eta = 0.2
    torch.testing.assert_close(auxiliary_loss(model), 2 * before)


def test_a_model_without_objectives_adds_a_zero_that_can_be_summed():
    model = layers(0.0)
    y = model(torch.randn(3, 5, 6))
    (y.sum() + auxiliary_loss(model)).backward()
    assert auxiliary_loss(nn.Identity()).item() == 0.0


def test_the_last_training_forward_counts():
    model = layers(0.1)
    x = torch.randn(2, 3, 5, 6)
    model(x[0])
    first = auxiliary_loss(model)
    model(x[1])
    assert auxiliary_loss(model) != first


def test_an_unknown_reduction_is_refused():
    with pytest.raises(InputError, match="reduction='max' must be 'sum' or 'mean'"):
        auxiliary_loss(layers(0.1), "max")


def test_an_objective_without_gradients_is_refused_where_gradients_are_wanted():
    model = layers(0.1)
    with torch.no_grad():
        model(torch.randn(3, 5, 6))
        assert auxiliary_loss(model) > 0
    with pytest.raises(RuntimeError, match="computed without gradients"):
        auxiliary_loss(model)


def test_minimising_it_brings_the_objective_to_zero():
    model = layers(1.0)
    x = torch.randn(3, 5, 6)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(200):
        optimizer.zero_grad()
        model(x)
        auxiliary_loss(model).backward()
        optimizer.step()
    assert model[0].objective.abs() < 1e-2
