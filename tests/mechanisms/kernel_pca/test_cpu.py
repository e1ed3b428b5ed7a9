"""The form of RPC-Attention that keeps L_t alone: equal to the formulas in any slices, and what it keeps."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention.functional import rpc_attention
from kernel_attention.mechanisms.kernel_pca import cpu as op
from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings

F64 = torch.float64
B, H, N, P = 3, 4, 7, 5
every_form = pytest.mark.parametrize("is_symmetric", [True, False], ids=["symmetric", "asymmetric"])
causal = pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
MASKS = {
    "": None,
    "right": torch.arange(N) < torch.tensor([[N], [3], [5]]),
    "holes": torch.tensor([[0, 1, 1, 0, 1, 1, 0], [1, 0, 1, 0, 0, 0, 1], [1] * 7]).bool(),
}


def draw(batch: int, is_symmetric: bool) -> list[Tensor]:
    """Keys, values and, where asymmetric, queries."""
    return [
        torch.randn(batch, N, H, P, dtype=F64).transpose(1, 2).requires_grad_()
        for _ in range(2 if is_symmetric else 3)
    ]


def fused_attention(k: Tensor, v: Tensor, *, q: Tensor | None, **options) -> Tensor:
    settings = PursuitSettings(convention="released", **options)
    return op.fused_rpc_attention(k, v, settings, q=q)


def outputs_and_gradients(attend, leaves: list[Tensor], mask: Tensor | None, **options) -> list[Tensor]:
    k, v, *q = leaves
    y = attend(k, v, q=q[0] if q else None, attention_mask=mask, lam=0.6, **options)
    if mask is not None:
        y = y.where(mask[:, None, :, None], 0.0)
    weight = torch.linspace(-1, 1, y.numel(), dtype=F64).view_as(y).sin()
    return [y, *torch.autograd.grad((y * weight).sum(), leaves)]


@pytest.mark.parametrize("least", [1, 2**15], ids=["slices", "whole"])
@pytest.mark.parametrize("iterations", [1, 2, 3, 6, 10])
@every_form
@pytest.mark.parametrize("mask", MASKS)
@causal
def test_outputs_and_gradients_are_those_of_the_formulas(
    least, iterations, is_symmetric, mask, is_causal, monkeypatch
):
    # Of 10 steps the offsets are made again from four places.
    monkeypatch.setattr(op, "_SLICE", least)
    for batch in (B, 1):
        leaves = draw(batch, is_symmetric)
        own = None if MASKS[mask] is None else MASKS[mask][:batch]
        ours, wanted = (
            outputs_and_gradients(attend, leaves, own, iterations=iterations, is_causal=is_causal)
            for attend in (fused_attention, rpc_attention)
        )
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("iterations", [1, 4, 50])
@pytest.mark.parametrize(("batch", "heads"), [(4, 2), (1, 12), (8, 3), (2, 5), (1, 1)])
def test_the_heads_of_a_slice_keep_the_threads_busy(threads, iterations, batch, heads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    sequences, part = op._slice_size(torch.empty(batch, heads, 1024, 64, device="meta"), iterations)
    assert sequences * part % threads == 0
    assert (sequences == 1 and heads % part == 0) or part == heads
    if iterations == 1:
        assert sequences * part >= batch * heads


def kept_bytes(layer: ka.RobustPrincipalAttention, x: Tensor) -> int:
    """Of the tensors that a training step keeps for its gradients, apart from the input and the weights."""
    known = {tensor.untyped_storage().data_ptr() for tensor in (x, *layer.parameters())}
    kept = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)  # held, so that no address is used twice
    assert y.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("iterations", [1, 2, 4, 6])
def test_a_training_step_keeps_one_tensor_of_every_step(iterations):
    # K, V and the output L_n as its projection reads it, then L_t and the logsumexp of a row of each head.
    layer = ka.create_attention("rpc", 32, 2, iterations=iterations)
    x = torch.randn(4, 512, 32, requires_grad=True)
    one, row = x.nbytes, x.nbytes // 16
    thresholds = 1024
    assert kept_bytes(layer, x) <= (iterations + 3) * one + (iterations + 1) * row + thresholds


@pytest.mark.parametrize(("is_symmetric", "size"), [(True, 1.0), (False, 1e4)], ids=["ordinary", "large"])
def test_the_operators_are_what_they_tell_the_compiler(is_symmetric, size):
    k, v, *q = (size * leaf.detach() for leaf in draw(B, is_symmetric))
    leaves = [None if not q else q[0].requires_grad_(), k.requires_grad_(), v.requires_grad_()]
    threshold = torch.rand(B, H, 1, 1, dtype=F64, requires_grad=True)
    inputs = (*leaves, threshold, MASKS["holes"], 3, False)
    # The gradients at large logits come from other operations, which the operator chooses by the values.
    torch.library.opcheck(op._pursuit, inputs)
    with torch.no_grad():
        low, kept = op._pursuit(*inputs)
    torch.library.opcheck(
        op._pursuit_backward,
        (torch.randn_like(low), *(x if x is None else x.detach() for x in inputs[:5]), low, kept, False),
        test_utils=("test_schema", "test_faketensor"),  # it has no gradient of its own
    )


def operator(k: Tensor, v: Tensor, threshold: Tensor, iterations: int = 3) -> Tensor:
    return op._pursuit(None, k, v, threshold, MASKS["right"], iterations, False)[0]


def eager(k: Tensor, v: Tensor, threshold: Tensor, iterations: int = 3) -> Tensor:
    return op._eager_pursuit(None, k, v, threshold, MASKS["right"], iterations, False)


def test_an_eager_call_gives_the_numbers_of_the_operator():
    threshold = torch.rand(B, H, 1, 1, dtype=F64, requires_grad=True)
    leaves = [*draw(B, True), threshold]
    results = []
    for call in (eager, operator):
        y = call(*leaves)
        results.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("call", [eager, operator])
def test_first_and_second_derivatives_equal_finite_differences(call):
    torch.manual_seed(0)
    threshold = torch.full((B, H, 1, 1), 0.4, dtype=F64, requires_grad=True)
    leaves = [*draw(B, True), threshold]
    assert torch.autograd.gradcheck(lambda *x: call(*x, 2), leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(lambda *x: call(*x, 2), leaves, fast_mode=True)


def test_a_graph_that_is_kept_gives_the_same_gradients_twice():
    layer = ka.create_attention("rpc", 32, 2, iterations=5)
    x = torch.randn(2, 11, 32, requires_grad=True)
    y = layer(x)
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_dropout_and_another_backend_take_the_formulas():
    x = torch.randn(2, 11, 32)
    layer = ka.create_attention("rpc", 32, 2, dropout=0.1)
    assert layer.plan(x)[:2] == ("reference", "the faster forms have no dropout")
    assert layer.eval().plan(x).engine == "fused"
    fused = ka.create_attention("rpc", 32, 2, impl="fused", dropout=0.1)
    with pytest.raises(
        ka.InputError, match="impl='fused': the faster forms have no dropout; use impl='auto'"
    ):
        fused(x)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert layer.plan(x).reason == "the fused form needs PyTorch's fused attention for CPUs"
        layer(x)
