"""torch.compile without graph breaks, and torch.export, give what eager mode gives."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import cases_where, every_case, inputs, objective, right_padding

from kernel_attention import auxiliary_loss


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def train_step(call, layer, x, **arguments):
    leaf = x.clone().requires_grad_()
    layer.zero_grad()
    y = call(leaf, **arguments)
    (y.square().sum() + auxiliary_loss(layer)).backward()
    return [y, leaf.grad, *(p.grad.clone() for p in layer.parameters())]


def assert_compiled_equals_eager(case, backend, lengths, dynamic=None):
    for form in case.call_forms():
        eager, compiled = case.build(), case.build()
        call = torch.compile(compiled, fullgraph=True, backend=backend, dynamic=dynamic)
        for length in lengths:
            x, mask = inputs(length=length), right_padding()[:, :length]
            torch.testing.assert_close(
                train_step(call, compiled, x, key_padding_mask=mask, **form),
                train_step(eager, eager, x, key_padding_mask=mask, **form),
            )
            if objective(eager) is not None:
                torch.testing.assert_close(objective(compiled), objective(eager))


@cases_where(others_slow=True)
def test_one_graph_serves_forward_and_backward(case):
    assert_compiled_equals_eager(case, "aot_eager", lengths=(11,))


@pytest.mark.slow
@every_case
def test_graphs_of_dynamic_length_equal_eager(case):
    assert_compiled_equals_eager(case, "aot_eager", lengths=(11, 7, 2), dynamic=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`torch._prims_common.check` is deprecated")  # inductor on aten.diagonal
@every_case
def test_inductor_equals_eager(case):
    assert_compiled_equals_eager(case, "inductor", lengths=(11,))


@cases_where(others_slow=True)
def test_new_lengths_do_not_compile_anew(case):
    # Two graphs: sequences that are sampled, and those so short that all tokens are.
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    layer = case.build()
    call = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    for length in (11, 7, 13, 17, 9, 2, 3):
        x = inputs(length=length)
        torch.testing.assert_close(call(x), layer(x))
    assert len(graphs) <= 2


@cases_where(others_slow=True)
def test_an_evaluated_layer_can_be_exported_with_any_length(case):
    layer = case.build().eval()
    x, mask = inputs(), right_padding()
    tokens = torch.export.Dim("tokens", min=5, max=13)  # shorter than the sampled rows is another graph
    program = torch.export.export(
        layer,
        (x,),
        {"key_padding_mask": mask},
        dynamic_shapes={"x": {1: tokens}, "key_padding_mask": {1: tokens}},
    )
    for length in (11, 7):
        arguments = {"key_padding_mask": mask[:, :length]}
        torch.testing.assert_close(
            program.module()(x[:, :length], **arguments), layer(x[:, :length], **arguments)
        )
