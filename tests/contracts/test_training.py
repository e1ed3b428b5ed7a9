"""What surrounds a layer in training: its objective, copies, checkpoints of weights and of activations."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from contracts.cases import (
    cases_where,
    every_case,
    every_class,
    inputs,
    objective,
    objective_cases,
    right_padding,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from kernel_attention import auxiliary_loss
from kernel_attention.attention import PenalizedAttention


def step(layer, x, **arguments):
    """Outputs and gradients of one training step."""
    layer.zero_grad()
    y = layer(x, **arguments)
    (y.square().sum() + auxiliary_loss(layer)).backward()
    return y, {name: p.grad.clone() for name, p in layer.named_parameters()}


@every_case
def test_every_parameter_is_trained(case):
    # DistributedDataParallel refuses a parameter that the loss does not reach.
    for form in case.call_forms():
        layer = case.build()
        y = layer(inputs(), key_padding_mask=right_padding(), **form)
        (y.square().sum() + auxiliary_loss(layer)).backward()
        assert [name for name, p in layer.named_parameters() if p.grad is None] == []


@objective_cases
def test_an_evaluation_leaves_the_objective_of_training_alone(case):
    layer = case.build()
    layer(inputs())
    before = objective(layer)
    layer.eval()
    with torch.no_grad():
        layer(inputs())
    layer(inputs())
    assert objective(layer) is before


@every_case
def test_a_layer_has_an_objective_where_its_weight_is_positive(case):
    layer = case.build()
    layer(inputs())
    assert (objective(layer) is not None) == case.has_objective
    assert (auxiliary_loss(layer) > 0) == case.has_objective


@every_case
def test_a_fresh_layer_adds_nothing_to_the_loss(case):
    assert auxiliary_loss(case.build()).item() == 0.0
    layer = case.build().eval()
    layer(inputs())
    assert auxiliary_loss(layer).item() == 0.0


@objective_cases
def test_the_auxiliary_loss_of_a_model_is_the_sum_over_its_layers(case):
    layers = [case.build(), case.build(), case.build()]
    model = nn.Sequential(nn.Linear(15, 15).double(), *layers)
    model(inputs())
    losses = torch.stack([auxiliary_loss(layer) for layer in layers])
    torch.testing.assert_close(auxiliary_loss(model), losses.sum())
    torch.testing.assert_close(auxiliary_loss(model, reduction="mean"), losses.mean())


@every_case
def test_weights_return_from_a_state_dict_to_the_same_outputs(case):
    layer, x = case.build(), inputs()
    y, _ = step(layer, x)
    stream = io.BytesIO()
    torch.save(layer.state_dict(), stream)
    stream.seek(0)
    other = case.build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(torch.load(stream, weights_only=True))
    assert torch.equal(other(x), y)
    assert set(layer.state_dict()) >= {name for name, _ in layer.named_parameters()}


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))])
@every_case
def test_a_layer_can_be_copied_after_a_training_forward(case, copied):
    layer, x = case.build(), inputs()
    y = layer(x)
    before = objective(layer)
    twin = copied(layer)
    assert objective(layer) is before
    assert objective(twin) is None
    assert torch.equal(twin(x), y)
    assert all(a is not b for a, b in zip(twin.parameters(), layer.parameters(), strict=True))


@every_case
def test_activation_checkpointing_gives_the_same_gradients(case):
    layer, x = case.build(), inputs()
    for form in case.call_forms():
        y, gradients = step(layer, x, **form)
        layer.zero_grad()
        again = checkpoint(layer, x, use_reentrant=False, **form)
        (again.square().sum() + auxiliary_loss(layer)).backward()
        torch.testing.assert_close(again, y)
        torch.testing.assert_close({name: p.grad for name, p in layer.named_parameters()}, gradients)


@objective_cases
def test_reentrant_checkpointing_is_found_out_by_the_auxiliary_loss(case):
    layer, x = case.build(), inputs().requires_grad_()
    checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        auxiliary_loss(layer)
    with torch.no_grad():  # for a log, no gradients are wanted
        assert auxiliary_loss(layer).isfinite()


@every_class
def test_printing_a_layer_says_its_sizes(case):
    assert "15, 3" in repr(case.build())


@cases_where(lambda case: issubclass(case.mechanism.layer, PenalizedAttention))
def test_the_objective_moves_neither_the_state_dict_nor_the_output_type(case):
    layer = case.build()
    names = set(layer.state_dict())
    assert isinstance(layer(inputs()), torch.Tensor)
    assert set(layer.state_dict()) == names
