"""Inductor gives what eager mode gives; the battery checks the graphs themselves."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import CASES, inputs, right_padding

from kernel_attention import auxiliary_loss


def train_step(call, layer, x, **arguments):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, **arguments)
    (y.square().sum() + auxiliary_loss(layer)).backward()
    return [y, leaf.grad, *(p.grad.clone() for p in layer.parameters())]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")  # inductor on aten.diagonal
@pytest.mark.parametrize(
    "case",
    [case for case in CASES if "one_graph_serves_forward_and_backward" not in case.variant.exempt],
    ids=str,
)
def test_inductor_equals_eager(case):
    torch.compiler.reset()
    x, mask = inputs(), right_padding()
    for form in case.call_forms():
        eager, compiled = case.build(), case.build()
        call = torch.compile(compiled, fullgraph=True, backend="inductor")
        torch.testing.assert_close(
            train_step(call, compiled, x, attention_mask=mask, **form),
            train_step(eager, eager, x, attention_mask=mask, **form),
        )
    torch.compiler.reset()
