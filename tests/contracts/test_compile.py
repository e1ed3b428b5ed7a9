"""Inductor gives what eager mode gives; the battery checks the graphs themselves."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import CASES, inputs, right_padding
from torch._dynamo.backends.debugging import aot_eager

from kernel_attention import auxiliary_loss, collect_objectives, create_attention


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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("primal", {"rank": 2, "rank_multiplier": 2, "eta": 0.1}),
        ("primal_values", {"rank": 3, "eta": 0.1}),
        ("multilinear", {"rank": 3, "eta": 0.1}),
    ],
)
def test_a_training_step_with_the_objective_is_one_graph_for_all_sizes(name, options):
    torch.compiler.reset()
    layer = create_attention(name, embed_dim=15, num_heads=3, **options).double().train()
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    def loss(x):
        with collect_objectives() as objectives:
            y = layer(x)
        return y.square().mean() + objectives.total()

    call = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for batch, length in ((5, 11), (3, 13)):
        x = torch.randn(batch, length, 15, dtype=torch.float64, requires_grad=True)
        found = torch.autograd.grad(call(x), [x, *layer.parameters()], allow_unused=True)
        torch.testing.assert_close(
            found, torch.autograd.grad(loss(x), [x, *layer.parameters()], allow_unused=True)
        )
    assert len(graphs) == 1
    torch.compiler.reset()
