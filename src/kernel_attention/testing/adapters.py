"""Adapters in the places of a layer's projections, as LoRA puts them there."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kernel_attention.errors import InputError
from kernel_attention.testing.battery import check, close
from kernel_attention.testing.subjects import Subject, inputs, right_padding


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
