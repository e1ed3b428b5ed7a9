"""Compiled and exported layers equal eager ones."""

from __future__ import annotations

from typing import Any

import torch

from kernel_attention.core.objective import auxiliary_loss
from kernel_attention.testing.battery import check, close
from kernel_attention.testing.subjects import LENGTH, Subject, inputs, objective, right_padding


@check()
def one_graph_serves_forward_and_backward(case: Subject) -> None:
    _compiled_equals_eager(case, lengths=(LENGTH,))


@check()
def graphs_of_dynamic_length_equal_eager(case: Subject) -> None:
    _compiled_equals_eager(case, lengths=(11,) if case.fixed_length else (11, 7, 2), dynamic=True)


def _compiled_equals_eager(case: Subject, lengths: tuple[int, ...], dynamic: bool | None = None) -> None:
    torch.compiler.reset()
    for form in case.call_forms():
        eager, compiled = case.build(), case.build()
        call = torch.compile(compiled, fullgraph=True, backend="aot_eager", dynamic=dynamic)
        for length in lengths:
            x, mask = inputs(length=length), right_padding()[:, :length]
            found = []
            for run, layer in ((call, compiled), (eager, eager)):
                leaf = x.clone().requires_grad_()
                layer.zero_grad()
                y = run(leaf, attention_mask=mask, **form)
                (y.square().sum() + auxiliary_loss(layer)).backward()
                found.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
            close(found[0], found[1])
            if objective(eager) is not None:
                close(objective(compiled), objective(eager))
    torch.compiler.reset()


@check("any length")
def new_lengths_do_not_compile_anew(case: Subject) -> None:
    graphs = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    layer = case.build()
    call = torch.compile(layer, fullgraph=True, backend=count, dynamic=True)
    # Two graphs: one for sampled sequences, one for sequences so short that all tokens are sampled. A length
    # of a single block of pooled tokens has one of its own, because PyTorch keeps a size of 1 apart.
    for lengths, most in (((11, 7, 13, 17, 9), 2), ((2, 3), 3)):
        for length in lengths:
            x = inputs(length=length)
            close(call(x), layer(x))
        assert len(graphs) <= most, f"{len(graphs)} graphs"
    torch.compiler.reset()


@check("any length")
def an_evaluated_layer_can_be_exported_with_any_length(case: Subject) -> None:
    layer = case.build().eval()
    x, mask = inputs(), right_padding()
    tokens = torch.export.Dim("tokens", min=5, max=13)  # shorter sequences need another graph
    program = torch.export.export(
        layer,
        (x,),
        {"attention_mask": mask},
        dynamic_shapes={"x": {1: tokens}, "attention_mask": {1: tokens}},
    )
    for length in (11, 7):
        arguments = {"attention_mask": mask[:, :length]}
        close(program.module()(x[:, :length], **arguments), layer(x[:, :length], **arguments))
