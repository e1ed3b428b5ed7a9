"""Training steps, the objective, adapters, and copies of a layer."""

import copy
import functools
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.objective import auxiliary_loss
from kernel_attention.core.penalized import PenalizedModule
from kernel_attention.errors import InputError
from kernel_attention.testing.battery import (
    EMBED_DIM,
    Subject,
    check,
    close,
    inputs,
    objective,
    required,
    right_padding,
)


def _step(layer: AttentionLayer, x: Tensor, **arguments: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """The outputs and gradients of one training step."""
    layer.zero_grad()
    y = layer(x, **arguments)
    (y.square().sum() + auxiliary_loss(layer)).backward()
    return y, {name: required(p.grad).clone() for name, p in layer.named_parameters()}


@check()
def every_parameter_is_trained(case: Subject) -> None:
    # DistributedDataParallel refuses a parameter that the loss does not reach.
    for form in case.call_forms():
        layer = case.build()
        y = layer(inputs(), attention_mask=right_padding(), **form)
        (y.square().sum() + auxiliary_loss(layer)).backward()
        assert [name for name, p in layer.named_parameters() if p.grad is None] == []


@check()
def the_objective_belongs_to_training(case: Subject) -> None:
    layer = case.build()
    if isinstance(layer, PenalizedModule) and layer.has_penalty:
        message = ""
        try:
            auxiliary_loss(layer)
        except RuntimeError as error:
            message = str(error)
        assert "no forward in training mode" in message, "a missing objective passes unnoticed"
    else:
        assert auxiliary_loss(layer).item() == 0.0, "a layer without an objective adds to the loss"
    names = set(layer.state_dict())
    layer(inputs())
    assert set(layer.state_dict()) == names, "the objective is in the state dict"
    before = objective(layer)
    layer.eval()
    with torch.no_grad():
        layer(inputs())
    layer(inputs())
    assert objective(layer) is before, "an evaluation changes the objective of training"
    fresh = case.build().eval()
    fresh(inputs())
    assert auxiliary_loss(fresh).item() == 0.0, "an evaluated layer adds to the loss"


@check()
def the_auxiliary_loss_of_a_model_is_the_sum_over_its_layers(case: Subject) -> None:
    layers = [case.build(), case.build(), case.build()]
    nn.Sequential(nn.Linear(EMBED_DIM, EMBED_DIM).double(), *layers)(inputs())
    losses = torch.stack([auxiliary_loss(layer) for layer in layers])
    model = nn.ModuleList(layers)
    close(auxiliary_loss(model), losses.sum())
    close(auxiliary_loss(model, reduction="mean"), losses.mean())


@check()
def weights_return_from_a_state_dict_to_the_same_outputs(case: Subject) -> None:
    layer, x = case.build(), inputs()
    y, _ = _step(layer, x)
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


@check()
def a_layer_can_be_copied_after_a_training_forward(case: Subject) -> None:
    for copied in (copy.deepcopy, lambda layer: pickle.loads(pickle.dumps(layer))):
        layer, x = case.build(), inputs()
        y = layer(x)
        before = objective(layer)
        twin = copied(layer)
        assert objective(layer) is before
        assert objective(twin) is None
        assert torch.equal(twin(x), y)
        assert all(a is not b for a, b in zip(twin.parameters(), layer.parameters(), strict=True))


@check()
def activation_checkpointing_gives_the_same_gradients(case: Subject) -> None:
    layer, x = case.build(), inputs()
    for form in case.call_forms():
        y, gradients = _step(layer, x, **form)
        layer.zero_grad()
        again = checkpoint(functools.partial(layer, **form), x, use_reentrant=False)
        (again.square().sum() + auxiliary_loss(layer)).backward()
        close(again, y)
        close({name: p.grad for name, p in layer.named_parameters()}, gradients)


@check()
def reentrant_checkpointing_is_found_out_by_the_auxiliary_loss(case: Subject) -> None:
    layer, x = case.build(), inputs().requires_grad_()
    checkpoint(layer, x, use_reentrant=True)
    if objective(layer) is None:
        assert auxiliary_loss(layer).item() == 0.0
        return
    try:
        auxiliary_loss(layer)
    except RuntimeError as error:
        message = str(error)
    else:
        raise AssertionError("an objective without gradients passed unnoticed")
    assert "use_reentrant=False" in message
    with torch.no_grad():  # for a log, which needs no gradients
        assert auxiliary_loss(layer).isfinite()


class Adapter(nn.Module):
    """A projection and a product to add to its outputs; its weight and bias are the projection's alone."""

    def __init__(self, base: nn.Linear, change: Tensor) -> None:
        super().__init__()
        self.base, self.change = base, change

    @property
    def weight(self) -> Tensor:
        """The weight without the change."""
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        """The bias, which has no change."""
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        """The projection of x (.., d_in) and what is added, (.., d_out)."""
        return self.base(x) + x @ self.change.mT


@check()
def an_adapter_counts_like_a_change_of_the_weight(case: Subject) -> None:
    # A form that reads the projections' weights must leave such a layer to the formulas, or refuse it.
    x, mask = inputs(), right_padding()
    projections = [
        (name, module.weight.shape)
        for name, module in case.build().named_children()
        if isinstance(module, nn.Linear)
    ]
    for form in case.call_forms():
        for name, shape in projections:
            adapted, changed, change = case.build(), case.build(), torch.randn(shape, dtype=x.dtype)
            setattr(adapted, name, Adapter(getattr(adapted, name), change))
            with torch.no_grad():
                getattr(changed, name).weight += change
            try:
                y = adapted(x, attention_mask=mask, **form)
            except InputError as error:
                refusal = str(error)
            else:
                refusal = ""
                close(y, changed(x, attention_mask=mask, **form))
            assert not refusal or name in refusal, f"refused without the name of {name}: {refusal}"
