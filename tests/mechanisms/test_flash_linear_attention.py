"""Causal linear attention and delta rules by flash-linear-attention's kernels equal the formulas."""

from __future__ import annotations

import pytest
import torch
from mechanisms.flash_linear_attention import fla as fla
from mechanisms.flash_linear_attention import linear_attn_of_one_sequence
from torch._subclasses import FakeTensorMode
from torch.testing import assert_close

import kernel_attention as ka
from kernel_attention.core.engine import choose
from kernel_attention.tensors.gpu import find_kernel
from kernel_attention.tensors.packing import pack_sequences

LENGTHS, HEADS, WIDTH = (7, 1, 5), 3, 16
N, D = sum(LENGTHS), HEADS * WIDTH
KINDS = {
    "linear": ("linear", {}),
    "relu": ("linear", {"feature_map": "relu"}),
    "cosine": ("cosine", {}),
    "identity": ("linear", {"feature_map": "identity"}),
    "delta": ("delta", {}),
    "gated_delta": ("gated_delta", {}),
}


def make(kind: str, **options) -> ka.AttentionLayer:
    name, own = KINDS[kind]
    torch.manual_seed(0)
    return ka.create_attention(name, D, HEADS, **own, **options)


def on_gpu(tokens: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor that says it is on a GPU, and holds no numbers."""
    with FakeTensorMode(), torch.device("cuda"):
        return torch.empty(1, tokens, D, dtype=dtype)


def engine_of(layer):
    """The engine, and the call of it on x with these sequences, as the layer makes it."""
    (engine,) = __import__(type(layer).__module__, fromlist=["ENGINES"]).ENGINES

    def attend(x, packed=None):
        heads = layer.projected(x, x)
        if hasattr(layer, "steps"):
            heads = (*heads, *(each for each in layer.steps(x) if each is not None))
        call = layer._call(x, True, packed=packed)._replace(heads=heads)
        return layer.out_proj(engine.attend(call).flatten(2))

    return engine, attend


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["rows", "packed"])
def test_a_kernel_of_the_documented_recurrence_gives_outputs_and_gradients(fla, kind, form):
    """Layout, scale, normalisation, unit keys, steps and logarithmic decays are those of the kernels."""
    layer = make(kind).double()
    x = torch.randn(1 if form == "packed" else 2, N, D, dtype=torch.float64, requires_grad=True)
    ends = torch.tensor((0, *LENGTHS)).cumsum(dim=0)
    packed = pack_sequences("", x, ends) if form == "packed" else None
    _, attend = engine_of(layer)
    expected = layer(x, is_causal=True, cu_seqlens=packed)
    found = attend(x, packed)
    assert_close(found, expected, rtol=1e-6, atol=1e-6)  # the kernels add 1e-10 to the sums
    leaves = [x, *layer.parameters()]
    probe = torch.randn_like(expected)
    first = [torch.autograd.grad(y, leaves, probe, create_graph=True) for y in (found, expected)]
    assert_close(*first, rtol=1e-6, atol=1e-6)
    again = [torch.autograd.grad(grads[0].square().sum(), x)[0] for grads in first]
    assert_close(*again, rtol=1e-6, atol=1e-6)
    plain = torch.autograd.grad(attend(x, packed), leaves, probe)
    assert_close(plain, first[1], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "delta", "gated_delta"])
def test_auto_takes_a_kernel_on_a_gpu_where_the_package_is(fla, kind):
    layer = make(kind)
    engine, _ = engine_of(layer)
    call = layer._call(on_gpu(128), True)
    assert choose("auto", (engine,), call)[0] is engine
    assert choose("auto", (engine,), call._replace(x=on_gpu(127)))[0] is None
    assert choose("reference", (engine,), call)[0] is None
    for reason, other in (
        ("causal self-attention without padding", call._replace(is_causal=False)),
        ("causal self-attention without padding", call._replace(is_whole=False)),
        ("for bfloat16, and products are in torch.float32", call._replace(x=on_gpu(128, torch.float32))),
        ("heads of width 8", call._replace(head_dim=8)),
        ("refuse fewer tokens than heads", call._replace(x=on_gpu(2))),
    ):
        assert reason in engine.why_not(other, False).reason
        assert choose("auto", (engine,), other)[0] is None
    assert "compiled graph" in engine.why_not(call, True).reason


def test_a_version_without_boundaries_gets_padded_batches(fla, monkeypatch):
    layer = make("linear")
    engine, _ = engine_of(layer)
    call = layer._call(on_gpu(N), True)
    packed = pack_sequences("", torch.zeros(1, N), torch.tensor([0, N]))
    assert engine.why_not(call._replace(packed=packed), False) is None
    monkeypatch.setattr(fla, "chunk_linear_attn", linear_attn_of_one_sequence)
    find_kernel.cache_clear()
    assert "no packed sequences" in engine.why_not(call._replace(packed=packed), False).reason
    assert engine.why_not(call, False) is None


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_the_plan_says_why_not(kind):
    layer, x = make(kind), torch.randn(1, N, D)
    assert "fla        no: its kernels are for NVIDIA GPUs" in str(layer.plan(x, is_causal=True))
    assert layer.plan(x, is_causal=True).engine == "reference"
    with pytest.raises(ka.InputError, match="impl='fla': its kernels are for NVIDIA GPUs"):
        make(kind, impl="fla")(x, is_causal=True)
    find_kernel.cache_clear()
    assert "is not installed" in str(layer.plan(on_gpu(128), is_causal=True))


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["rows", "packed"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_real_kernels_equal_the_formulas(kind, form):
    """In bfloat16, within what the formulas in bfloat16 are from those in float32."""
    pytest.importorskip("fla", reason="flash-linear-attention is not installed")
    lengths = (200, 1, 99)
    x = torch.randn(1 if form == "packed" else 2, sum(lengths), D, device="cuda")
    call = {"is_causal": True}
    if form == "packed":
        call["cu_seqlens"] = torch.tensor((0, *lengths), device="cuda").cumsum(dim=0)
    results = []
    for impl, dtype in (
        ("reference", torch.float32),
        ("reference", torch.bfloat16),
        ("auto", torch.bfloat16),
    ):
        layer = make(kind, impl=impl).to("cuda", dtype)
        leaf = x.to(dtype).requires_grad_()
        assert impl == "reference" or layer.plan(leaf, is_causal=True).engine == "fla"
        y = layer(leaf, **call)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *layer.parameters()])])
    for exact, rounded, found in zip(*results, strict=True):
        error = (rounded.float() - exact).norm() / exact.norm()
        assert (found.float() - exact).norm() / exact.norm() <= 3 * error + 1e-2
