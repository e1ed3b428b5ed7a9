"""Inductor gives what eager mode gives; the battery checks the graphs themselves."""

from __future__ import annotations

import pytest
import torch
from contracts.cases import CASES, EMBED_DIM, HEADS, inputs, right_padding
from torch._dynamo.backends.debugging import aot_eager

from kernel_attention import auxiliary_loss, collect_objectives, list_attention


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


SIZES = (5, 11), (3, 13)
_OPTIONS = {"rank": 2, "rank_multiplier": 2, "eta": 0.1, "max_len": 17, "sample": False}
_QUICK = "multilinear", "linear-causal"  # of graphs and of programs
# Guards on the length: the sampling grid, one block or several, and blocks of pooled tokens.
_OF_FEW_LENGTHS = {"primal", "kernel_gp", "ridge", "scaled_heads", "batch_norm_scaled_heads"}


def _build(mechanism, **where):
    """A layer with the objective where the mechanism has one."""
    own = {name: value for name, value in _OPTIONS.items() if name in mechanism.options}
    layer = mechanism.build(EMBED_DIM, HEADS, **{**own, **mechanism.example})
    return layer.to(**where).train()


def _rows(quick=""):
    """Every mechanism, in its causal form too."""
    rows = []
    for mechanism in list_attention():
        for is_causal in (False, True):
            if not is_causal or _build(mechanism).supports(causal=True):
                name = mechanism.name + is_causal * "-causal"
                marks = () if name == quick else pytest.mark.slow
                rows.append(pytest.param(mechanism, is_causal, id=name, marks=marks))
    return rows


def _loss(layer, is_causal):
    """The loss of a training step, with J^2 where the layer has an objective."""

    def loss(x):
        with collect_objectives() as objectives:
            y = layer(x, is_causal=is_causal)
        return y.square().mean() + (objectives.total() if objectives.calls else 0.0)

    return loss


def _inputs_of_all_sizes(mechanism):
    for batch, length in SIZES:
        length = 11 if "grid_size" in mechanism.options else length
        yield torch.randn(batch, length, EMBED_DIM, dtype=torch.float64)


@pytest.mark.parametrize(("mechanism", "is_causal"), _rows(_QUICK[0]))
def test_graphs_serve_batches_and_lengths_of_all_sizes(mechanism, is_causal):
    """A training step with J^2 is one graph, and recompiles once at most."""
    torch.compiler.reset()
    layer = _build(mechanism, dtype=torch.float64)
    graphs, loss = [], _loss(layer, is_causal)

    def backend(graph, example_inputs):
        graphs.append(graph)
        return aot_eager(graph, example_inputs)

    call = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for x in _inputs_of_all_sizes(mechanism):
        leaves = [x.requires_grad_(), *layer.parameters()]
        found = torch.autograd.grad(call(x), leaves, allow_unused=True)
        torch.testing.assert_close(found, torch.autograd.grad(loss(x), leaves, allow_unused=True))
    assert len(graphs) <= 2, f"{len(graphs)} graphs"
    torch.compiler.reset()


@pytest.mark.parametrize(("mechanism", "is_causal"), _rows(_QUICK[1]))
def test_an_exported_layer_takes_batches_and_lengths_of_all_sizes(mechanism, is_causal):
    if is_causal and mechanism.name in _OF_FEW_LENGTHS:
        pytest.xfail("its program has a guard on the length")
    layer = _build(mechanism, dtype=torch.float64).eval()
    example, *others = _inputs_of_all_sizes(mechanism)
    dims = {0: torch.export.Dim("batch", min=2, max=64)}
    if "grid_size" not in mechanism.options:
        dims[1] = torch.export.Dim("tokens", min=5, max=17)  # shorter sequences need another graph
    program = torch.export.export(
        layer, (example,), {"is_causal": is_causal}, dynamic_shapes={"x": dims, "is_causal": None}
    )
    for x in others:
        found = program.module()(x, is_causal=is_causal)
        torch.testing.assert_close(found, layer(x, is_causal=is_causal))


def _captured(loss, x, leaves):
    """The gradients of a training step as a CUDA graph that reads x: what replays it, and its results."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):  # what is made once and kept is made before the capture
            torch.autograd.grad(loss(x), leaves, allow_unused=True)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = torch.autograd.grad(loss(x), leaves, allow_unused=True)
    return graph.replay, found


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("mechanism", "is_causal"), _rows())
def test_a_training_step_is_a_cuda_graph(mechanism, is_causal):
    """Captured by hand, and by the compiler's mode reduce-overhead."""
    torch.compiler.reset()
    layer = _build(mechanism, device="cuda", dtype=torch.float32)
    loss = _loss(layer, is_causal)
    x = torch.randn(5, 11, EMBED_DIM, device="cuda", requires_grad=True)
    leaves = [x, *layer.parameters()]
    replay, captured = _captured(loss, x, leaves)
    call = torch.compile(loss, fullgraph=True, mode="reduce-overhead")
    for _ in range(3):  # it warms up, records and replays
        with torch.no_grad():
            x.normal_()
        expected = torch.autograd.grad(loss(x), leaves, allow_unused=True)
        replay()
        torch.testing.assert_close(captured, expected, rtol=1e-3, atol=1e-4)
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(call(x), leaves, allow_unused=True)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    torch.compiler.reset()
