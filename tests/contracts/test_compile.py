"""Compiled, exported and captured training steps, with the objective; the battery checks single layers."""

from __future__ import annotations

import itertools

import pytest
import torch
from contracts.cases import CASES, inputs, right_padding
from torch._dynamo.backends.debugging import aot_eager

from kernel_attention import auxiliary_loss, collect_objectives
from kernel_attention.mechanisms import MECHANISMS, get_mechanism
from kernel_attention.testing import subject


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


QUICK = ("primal_values", "meta", False)  # the others take minutes
OPTIONS = {
    "primal": {"rank": 2, "rank_multiplier": 2, "eta": 0.1, "max_len": 17},
    "primal_values": {"rank": 3, "eta": 0.1},
    "multilinear": {"rank": 3, "eta": 0.1},
}
STEPS = [
    pytest.param(
        name, device, is_causal, marks=[] if (name, device, is_causal) == QUICK else [pytest.mark.slow]
    )
    for name, device, is_causal in itertools.product(MECHANISMS, ("cpu", "meta"), (False, True))
    if get_mechanism(name).causal or not is_causal
]


@pytest.mark.parametrize(("name", "device", "is_causal"), STEPS)
def test_a_training_step_with_the_objective_is_one_graph_for_all_sizes(name, device, is_causal):
    """On the device meta a layer takes the branches of an accelerator."""
    torch.compiler.reset()
    case = subject(name, **OPTIONS.get(name, {}))
    layer = case.build().to(device)
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    def loss(x):
        with collect_objectives() as objectives:
            y = layer(x, is_causal=is_causal)
        value = y.square().mean()
        return value + objectives.total() if objectives.calls else value

    call = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    sizes = ((5, 11), (3, 13))
    for batch, length in sizes if not case.fixed_length else ((5, 11), (3, 11)):
        x = torch.randn(batch, length, 15, dtype=torch.float64).to(device).requires_grad_()
        found = torch.autograd.grad(call(x), [x, *layer.parameters()], allow_unused=True)
        if device == "cpu":
            expected = torch.autograd.grad(loss(x), [x, *layer.parameters()], allow_unused=True)
            torch.testing.assert_close(found, expected)
    assert len(graphs) <= 2
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MECHANISMS if not subject(name).fixed_length])
def test_a_layer_is_exported_for_every_batch_and_length(name):
    case = subject(name, **OPTIONS.get(name, {}))
    dims = {0: torch.export.Dim("batch", min=2, max=64), 1: torch.export.Dim("tokens", min=5, max=13)}
    for form in case.call_forms():
        layer = case.build().eval()
        mask = right_padding()
        program = torch.export.export(
            layer, (inputs(),), {"attention_mask": mask, **form},
            dynamic_shapes={"x": dims, "attention_mask": dims, **dict.fromkeys(form)},
        ).module()  # fmt: skip
        for batch, length in ((7, 11), (3, 7)):
            x, arguments = inputs(batch=batch, length=length), {"attention_mask": mask[:batch, :length]}
            torch.testing.assert_close(program(x, **arguments, **form), layer(x, **arguments, **form))


@pytest.mark.gpu
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("name", MECHANISMS)
def test_cuda_graphs_hold_a_training_step(name, is_causal):
    """Captured by hand, and by ``mode="reduce-overhead"``: the gradients of the layer called as it is."""
    if is_causal and not get_mechanism(name).causal:
        pytest.skip("not causal")
    case = subject(name, **OPTIONS.get(name, {}))
    layer = case.build(torch.float32).cuda()
    parameters = [each for each in layer.parameters() if each.requires_grad]
    x = inputs(torch.float32).cuda().requires_grad_()

    def step(x):
        with collect_objectives() as objectives:
            y = layer(x, is_causal=is_causal)
        value = y.square().mean()
        return value + objectives.total() if objectives.calls else value

    def gradients(call):
        return torch.autograd.grad(call(x), [x, *parameters], allow_unused=True)

    expected = gradients(step)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            gradients(step)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(step)
    with torch.no_grad():
        x.mul_(1.5)
    graph.replay()
    torch.testing.assert_close(captured, gradients(step), rtol=1e-3, atol=1e-4)
    with torch.no_grad():
        x.div_(1.5)
    graph.replay()
    torch.testing.assert_close(captured, expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = [each if each is None else each.clone() for each in gradients(compiled)]
        torch.testing.assert_close(tuple(found), expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
