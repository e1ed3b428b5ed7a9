"""Hand-written passes stay in compiled, exported, checkpointed and distributed layers."""

from __future__ import annotations

import contextlib
import gc
import io
import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

import kernel_attention as ka

F64 = torch.float64
LAYERS = {
    "primal native": ("primal", {"rank": 4, "rank_multiplier": 2, "eta": 0.3, "impl": "native"}),
    "primal": ("primal", {"rank": 4, "rank_multiplier": 2, "eta": 0.3}),
    "primal data-independent": ("primal", {"rank": 4, "data_dependent": False, "eta": 0.3}),
    "multilinear": ("multilinear", {"rank": 3, "eta": 0.3}),
    "multilinear data-dependent": (
        "multilinear", {"rank": 3, "variant": "data_dependent", "rank_multiplier": 2, "eta": 0.3}
    ),
}  # fmt: skip
every_layer = pytest.mark.parametrize("name", LAYERS)
# Compiling one takes seconds; the operators of the others are registered in the same way.
every_operator = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "primal" else pytest.mark.slow) for name in LAYERS]
)
primal_quickly = pytest.mark.parametrize(
    "name", ["primal", pytest.param("multilinear", marks=pytest.mark.slow)]
)
one_of_each = pytest.mark.parametrize("name", ["primal", "multilinear"])


@pytest.fixture(autouse=True)
def _compilers(built_engines: None) -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def make(name: str, impl: str | None = None, dtype: torch.dtype = F64, **options) -> ka.AttentionLayer:
    torch.manual_seed(0)
    mechanism, own = LAYERS[name]
    layer = ka.create_attention(
        mechanism, embed_dim=10, num_heads=2, **{"impl": impl or "fused", **own, **options}
    )
    return layer.to(dtype).train()


def step(call: Callable[..., Tensor], layer: ka.AttentionLayer, x: Tensor, **arguments) -> list[Tensor]:
    """Output, J, and the gradients of a training step."""
    x = x.detach().requires_grad_()
    layer.zero_grad(set_to_none=True)
    y = call(x, **arguments)
    (y.sin().sum() + ka.auxiliary_loss(layer)).backward()
    found = [y.detach(), x.grad, *(p.grad for p in layer.parameters())]
    return found if layer.objective is None else [*found, layer.objective.detach()]


@every_operator
def test_the_operators_stay_in_compiled_training_steps(name):
    graphs: list[list[str]] = []

    def note(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph)

    layer, x = make(name), torch.randn(3, 11, 10, dtype=F64)
    mask = torch.arange(11) < torch.tensor([[11], [5], [8]])
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    eager = step(layer, layer, x, attention_mask=mask)
    torch.testing.assert_close(step(compiled, layer, x, attention_mask=mask), eager)
    targets = [target for graph in graphs for target in graph]
    operator = f"kernel_attention.{name.split(' data')[0].replace(' ', '_')}_map"
    assert any(target.startswith(f"{operator}.default") for target in targets)
    assert any(target.startswith(f"{operator}_backward.default") for target in targets)


@primal_quickly
def test_autocast_reaches_the_operator_in_compiled_code_too(name):
    layer, x = make(name, dtype=torch.float32), torch.randn(3, 11, 10)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for call in (compiled, layer):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = call(x)
        assert y.dtype == torch.bfloat16
        assert layer.objective.dtype == torch.float32
        torch.testing.assert_close(y.float(), layer(x), rtol=0.03, atol=0.03)


@every_operator
def test_an_exported_program_keeps_the_operator_that_was_asked_for(name):
    layer, x = make(name).eval(), torch.randn(3, 11, 10, dtype=F64)
    tokens = torch.export.Dim("tokens", min=7, max=500)
    program = torch.export.export(layer, (x,), dynamic_shapes={"x": {1: tokens}})
    operator = f"kernel_attention.{name.split(' data')[0].replace(' ', '_')}_map.default"
    assert operator in {str(node.target) for node in program.graph.nodes}
    saved = io.BytesIO()
    torch.export.save(program, saved)
    saved.seek(0)
    opened = torch.export.load(saved).module()
    for length in (7, 300):  # fewer tokens than rows of W in primal attention, and more
        x = torch.randn(3, length, 10, dtype=F64)
        torch.testing.assert_close(opened(x), layer(x))


@pytest.mark.slow  # it compiles C++
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@one_of_each
def test_aot_inductor_runs_the_operator(name, tmp_path):
    layer = make(name, dtype=torch.float32).eval()
    tokens = torch.export.Dim("tokens", min=7, max=500)
    program = torch.export.export(layer, (torch.randn(3, 11, 10),), dynamic_shapes={"x": {1: tokens}})
    package = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
    loaded = torch._inductor.aoti_load_package(package)
    for length in (11, 300):
        x = torch.randn(3, length, 10)
        with torch.no_grad():
            torch.testing.assert_close(loaded(x), layer(x))


@one_of_each
def test_an_exported_program_of_auto_needs_no_operator_of_ours(name):
    layer, x = make(name, "auto").eval(), torch.randn(1, 5000, 10, dtype=F64)
    assert layer.plan(x).engine != "reference"
    program = torch.export.export(layer, (x,))
    assert not any("kernel_attention" in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), layer(x))


@primal_quickly
def test_checkpointing_computes_the_operator_again(name):
    x = torch.randn(3, 11, 10, dtype=F64)
    for eta in (0.3, 0.0):
        layer = make(name, eta=eta)
        expected = step(layer, layer, x)

        def checkpointed(x: Tensor, layer: nn.Module = layer) -> Tensor:
            return checkpoint(layer, x, use_reentrant=False)

        torch.testing.assert_close(step(checkpointed, layer, x), expected)
        if eta == 0.0:  # torch compiles no checkpoint of a layer that keeps its objective
            compiled = torch.compile(checkpointed, fullgraph=True, backend="aot_eager")
            torch.testing.assert_close(step(compiled, layer, x), expected)


@contextlib.contextmanager
def alone(folder) -> Iterator[None]:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=(folder / "meeting").as_uri(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def distributed_step(layer: nn.Module, x: Tensor, is_compiled: bool):
    """``step`` by a data-parallel model that ends with this function, before its process group does.

    A model that outlives its group destroys it with the GIL held and waits for gloo's threads, one of which
    may wait for the GIL.
    """
    model: nn.Module = nn.parallel.DistributedDataParallel(layer)
    return step(torch.compile(model, backend="aot_eager") if is_compiled else model, layer, x)


@pytest.mark.parametrize(
    "is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["eager", "compiled"]
)
@primal_quickly
def test_distributed_training_takes_it(name, tmp_path, is_compiled):
    layer, x = make(name), torch.randn(3, 11, 10, dtype=F64)
    expected = step(layer, layer, x)
    with alone(tmp_path):
        found = distributed_step(layer, x, is_compiled)
        torch.compiler.reset()  # compiled code holds the model
        gc.collect()
    torch.testing.assert_close(found, expected)


@one_of_each
def test_tensors_without_values_have_gradients_without_values(name):
    with FakeTensorMode():
        mechanism, options = LAYERS[name]
        layer = ka.create_attention(
            mechanism, embed_dim=10, num_heads=2, **{**options, "eta": 0.0, "impl": "fused"}
        )
        x = torch.randn(3, 11, 10, requires_grad=True)
        layer(x).sum().backward()
        assert x.grad.shape == x.shape
        assert all(p.grad.shape == p.shape for p in layer.parameters())


@every_layer
def test_a_step_without_values_runs_on_the_meta_device(name):
    layer = make(name).float().to("meta")
    x = torch.randn(3, 11, 10, device="meta", requires_grad=True)
    (layer(x).sum() + ka.auxiliary_loss(layer)).backward()
    assert x.grad.shape == x.shape
