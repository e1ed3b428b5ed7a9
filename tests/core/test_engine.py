"""``layer.plan(x)`` says which engine runs, and it is the engine that runs."""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad

import kernel_attention as ka

ENGINES = {"reference", "fused", "dense"}


def tokens(length: int, device: str = "cpu") -> Tensor:
    return torch.randn(1, length, 8, device=device)


NEEDED = {"conv2d": {"grid_size": (3, 3)}, "tensor": {"max_len": 9}}


@pytest.mark.parametrize("name", [mechanism.name for mechanism in ka.list_attention()])
def test_every_layer_has_a_plan(name):
    layer = ka.create_attention(name, embed_dim=8, num_heads=2, **NEEDED.get(name, {}))
    plan = layer.plan(tokens(9))
    assert plan.engine in ENGINES
    assert plan.reason


@pytest.mark.parametrize(
    ("layer", "eager", "compiled"),
    [
        (ka.PrimalAttention(8, 2, rank=2), 256, 2048),
        (ka.PrimalAttention(64, 2, rank=2), 512, 2048),
        (ka.PrimalAttention(128, 4, rank=2), 1024, 2048),
        (ka.MultilinearAttention(8, 2), 16, 32),
    ],
    ids=["primal", "wide primal", "wide primal with narrow heads", "multilinear"],
)
def test_auto_takes_the_faster_form_from_a_measured_number_of_tokens_on(layer, eager, compiled):
    for least, how in ((eager, "eager"), (compiled, "compiled")):
        short, long = (layer.plan(tokens(n), compiled=how == "compiled") for n in (least - 1, least))
        assert short[:2] == ("reference", f"fewer than {least} tokens (cpu, {how})")
        assert long.engine == "fused"
        assert f"at least {least} tokens" in long.reason
    assert layer.plan(tokens(eager)).engine == "fused"  # eagerly, as the test runs
    on_meta = layer.plan(tokens(5000, "meta"), compiled=True)
    assert on_meta[:2] == ("reference", "no engine was measured to be faster (meta, compiled)")


def test_an_accelerator_takes_the_pass_of_few_launches():
    assert ka.PrimalAttention(8, 2, rank=2).plan(tokens(5, "meta")).engine == "fused"


def test_engines_that_were_asked_for_are_named():
    def plan(impl: str, **options):
        return ka.create_attention("rpc", 8, 2, impl=impl).plan(tokens(9), **options)[:2]

    assert plan("triton", is_causal=True) == ("triton", "impl='triton'")
    assert plan("reference") == ("reference", "impl='reference'")
    assert plan("auto") == ("fused", "at least 1 tokens (cpu, eager)")
    assert plan("auto", compiled=True) == (
        "reference", "no engine was measured to be faster (cpu, compiled)",
    )  # fmt: skip


def test_a_sparse_pattern_runs_in_blocks_where_they_save_logits():
    layer = ka.SparseAttention(8, 2, stride=16)
    assert layer.plan(tokens(520)).engine == "blocked"
    assert layer.plan(tokens(511)).engine == "dense"
    assert ka.SparseAttention(8, 2, impl="dense").plan(tokens(520))[:2] == ("dense", "impl='dense'")


def test_a_printed_plan_is_the_table_of_the_engines():
    printed = str(ka.PrimalAttention(8, 2, rank=2).plan(tokens(9)))
    assert (
        printed
        == """\
engine     serves the call                                                   chosen
native     no: it is not built: run python -m kernel_attention.native build
fused      yes, pays from 256
reference  yes                                                               fewer than 256 tokens \
(cpu, eager)"""
    )


@pytest.mark.parametrize(("name", "gone"), [("primal", "triton"), ("rpc", "native"), ("linear", "triton")])
def test_an_engine_that_files_of_earlier_releases_name_gives_way_to_auto(name, gone):
    with pytest.warns(UserWarning, match=f"impl='{gone}' exists no more; impl='auto' takes its place"):
        layer = ka.create_attention(name, 8, 2, impl=gone)
    assert layer.impl == "auto"
    with pytest.raises(ka.InputError, match="unknown impl 'cuda'"):
        ka.create_attention(name, 8, 2, impl="cuda")


def test_a_form_that_was_measured_to_be_slower_is_not_taken():
    plan = ka.PrimalAttention(72, 2, rank=2).plan(torch.randn(1, 100_000, 72), compiled=True)
    assert plan[:2] == ("reference", "no engine was measured to be faster (cpu, compiled)")


@pytest.mark.parametrize(
    ("layer", "call", "reason"),
    [
        (
            ka.PrimalAttention(8, 2, rank=2, max_len=5000, eta=0.1),
            {"is_causal": True},
            "no objective of data-dependent weights",
        ),
        (ka.PrimalAttention(8, 2, rank=2, feature_map="elu"), {}, "feature map cosine or identity"),
        (ka.PrimalAttention(8, 2, rank=2, impl="reference"), {}, "impl='reference'"),
        (ka.MultilinearAttention(8, 2), {"is_causal": True}, "no form with is_causal=True"),
        (ka.MultilinearAttention(8, 2, feature_map="cosine"), {}, "feature map frobenius or identity"),
    ],
)
def test_what_no_engine_serves_runs_by_the_formulas_unless_an_engine_was_asked_for(layer, call, reason):
    plan = layer.plan(tokens(4096), **call)
    assert plan.engine == "reference"
    assert reason in plan.reason
    if layer.impl == "auto":
        layer.impl = "fused"
        with pytest.raises(ka.InputError, match="impl='fused'"):
            layer(tokens(9), **call)


LAYERS = {
    "primal": lambda impl="auto": ka.PrimalAttention(8, 2, rank=2, impl=impl),
    "multilinear": lambda impl="auto": ka.MultilinearAttention(8, 2, impl=impl),
}
every_layer = pytest.mark.parametrize("name", LAYERS)


@pytest.mark.parametrize("name", [*LAYERS, "rpc"])
def test_a_form_that_was_asked_for_runs_or_is_refused(name):
    layer = ka.RobustPrincipalAttention(8, 2, impl="fused") if name == "rpc" else LAYERS[name]("fused")
    assert layer.plan(tokens(3))[:2] == ("fused", "impl='fused'")
    assert layer.plan(tokens(3), compiled=True).engine == "fused"
    with pytest.raises(ka.InputError, match=r"impl='fused': torch\.func transforms the formulas; use impl="):
        torch.func.vmap(layer)(tokens(3)[None])


@every_layer
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode
def test_transforms_and_forward_mode_get_the_formulas(name):
    layer, x, plans = LAYERS[name](), tokens(300), []

    def call(x: Tensor) -> Tensor:
        plans.append(layer.plan(x))
        return layer(x)

    torch.func.vmap(call)(x[None])
    torch.func.grad(lambda x: call(x).sum())(x)
    with forward_ad.dual_level():
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    assert [plan.engine for plan in plans] == ["reference"] * 3
    assert [plan.reason.split()[0] for plan in plans] == ["torch.func", "torch.func", "forward-mode"]
    assert layer.plan(x).engine == "fused"


def why_called(projection: str) -> str:
    return f"{projection} is an adapter, is quantized or has hooks, so it must be called"


@pytest.mark.parametrize(
    ("name", "how"), [("primal", "eager"), ("multilinear", "eager"), ("primal", "compiled")]
)
def test_projections_with_hooks_are_called(name, how):
    layer, x = LAYERS[name](), tokens(2048)
    for projection in ("concat",) if how == "compiled" else ("q_proj", "concat", "out_proj"):
        before, linear = layer(x), getattr(layer, projection)
        hook = linear.register_forward_hook(lambda module, inputs, y: y + 1)
        assert layer.plan(x).reason == why_called(projection)
        torch.compiler.reset()
        call = torch.compile(layer, fullgraph=True, backend="eager") if how == "compiled" else layer
        hooked = call(x)
        hook.remove()
        assert layer.plan(x).engine == "fused"
        with torch.no_grad():
            linear.bias += 1
        torch.testing.assert_close(hooked, layer(x))
        assert not torch.allclose(hooked, before)
    torch.compiler.reset()


@every_layer
def test_a_form_that_reads_weights_is_refused_beside_an_adapter(name):
    layer = LAYERS[name]("fused")
    layer.k_proj = nn.Sequential(layer.k_proj)
    with pytest.raises(ka.InputError, match=f"impl='fused': {why_called('k_proj')}; use impl"):
        layer(tokens(3))


@pytest.mark.parametrize(
    ("name", "length", "form"),
    [
        ("primal", 31, "reference"),
        ("primal", 2048, "fused"),
        pytest.param("multilinear", 2048, "fused", marks=pytest.mark.slow),
    ],
)
def test_compiled_code_has_the_form_of_the_plan(name, length, form):
    graphs = []

    def note(graph, _):
        graphs.extend(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph)

    torch.compiler.reset()
    layer, x = LAYERS[name]().eval(), tokens(length)
    compiled = torch.compile(layer, fullgraph=True, backend=aot_autograd(fw_compiler=note))
    torch.testing.assert_close(compiled(x), layer(x))
    assert layer.plan(x, compiled=True).engine == form
    assert any("kernel_attention" in target for target in graphs) == (form == "fused")
    torch.compiler.reset()


class _Positional(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_onnx_gets_the_formulas():
    # The exporter through torch.export needs packages that are not here; both set the same flag.
    plans, layer = [], LAYERS["primal"]().eval()
    layer.register_forward_pre_hook(lambda module, arguments: plans.append(module.plan(*arguments)))
    with contextlib.suppress(torch.onnx.OnnxExporterError):  # it knows no vector norm
        torch.onnx.export(_Positional(layer), (tokens(300),), io.BytesIO(), dynamo=False)
    assert plans
    assert {plan.reason for plan in plans} == {"ONNX has the formulas' operators only"}
    assert layer.plan(tokens(300)).engine == "fused"
