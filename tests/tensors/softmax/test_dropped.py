"""Softmax attention that drops weights: block by block, it is the formula with the masks that were drawn."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad, gradcheck, gradgradcheck
from torch.utils.checkpoint import checkpoint

from kernel_attention.tensors.recompute import formulas_only
from kernel_attention.tensors.softmax import dropped
from kernel_attention.tensors.softmax.dropped import additive_mask, softmax_dropout_attention

B, H, N, S, P, P_V = 2, 3, 7, 5, 2, 4
RATE = 0.3
READS = ["all", "past", "masked", "padded", "padded past"]


@pytest.fixture(params=["rows", "heads", "sequences"], autouse=True)
def blocks(request, monkeypatch):
    """Blocks of three queries of a head, of two heads of a sequence, and of both sequences."""
    weights = {"rows": 3 * S, "heads": 2 * N * S, "sequences": B * H * N * S}[request.param]
    monkeypatch.setattr(dropped, "_BLOCK", weights)
    monkeypatch.setattr(dropped, "_LEAST_ROWS", 1)
    monkeypatch.setattr(dropped, "_FEW", 0)


def inputs(dtype=torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    shapes = (B, H, N, P), (B, H, S, P), (B, H, S, P_V)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def seen(reads: str) -> dict:
    if reads == "masked":
        mask = torch.rand(B, 1, N, S) < 0.6
        mask[1, :, 4] = False  # a query that sees no key
        return {"mask": mask}
    if reads.startswith("padded"):
        mask = torch.ones(B, 1, 1, S, dtype=torch.bool)
        mask[1, ..., :2] = False  # on the left: two queries of the past see no key, and all of all do
        return {"mask": mask, "is_causal": reads == "padded past"}
    return {"is_causal": reads == "past"}


def attend(seed, q, k, v, *, mask=None, is_causal=False, rate=RATE):
    torch.manual_seed(seed)
    return softmax_dropout_attention(q, k, v, additive_mask(mask, q), is_causal, rate, 0.5)


def factors(seed, **reads) -> Tensor:
    """The factors of the weights: a call with one-hot values over the same without dropout."""
    q, k = torch.zeros(B, H, N, P, dtype=torch.float64), torch.zeros(B, H, S, P, dtype=torch.float64)
    one_hot = torch.eye(S, dtype=torch.float64).expand(B, H, S, S)
    mean = attend(seed, q, k, one_hot, rate=0.0, **reads)
    return torch.where(mean > 0, attend(seed, q, k, one_hot, **reads) / mean, 0.0)


def formula(factor, q, k, v, *, mask=None, is_causal=False):
    """Plain loops over queries, with given factors of the weights."""
    out = torch.zeros(B, H, N, P_V, dtype=torch.float64)
    rows = None if mask is None else mask.expand(B, 1, N, S)
    for b, h, i in torch.cartesian_prod(torch.arange(B), torch.arange(H), torch.arange(N)).tolist():
        keys = [
            j for j in range(S) if (mask is None or rows[b, 0, i, j]) and (not is_causal or j <= i)
        ]  # fmt: skip
        if keys:
            weights = (0.5 * k[b, h, keys] @ q[b, h, i]).softmax(dim=0)
            out[b, h, i] = (weights * factor[b, h, i, keys]) @ v[b, h, keys]
    return out


@pytest.mark.parametrize("reads", READS)
def test_it_is_the_formula_with_the_masks_that_were_drawn(reads):
    q, k, v = inputs()
    reads = seen(reads)
    factor = factors(1, **reads)
    dropped = (factor == 0).double().mean()
    assert 0.1 < dropped < 0.9
    grad = torch.randn(B, H, N, P_V, dtype=torch.float64)
    got, wanted = attend(1, q, k, v, **reads), formula(factor, q, k, v, **reads)
    torch.testing.assert_close(got, wanted)
    for mine, theirs in zip(
        torch.autograd.grad(got, (q, k, v), grad), torch.autograd.grad(wanted, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("reads", READS)
def test_gradients_and_their_gradients(reads):
    reads = seen(reads)
    for check in (gradcheck, gradgradcheck):
        assert check(lambda *x: attend(2, *x, **reads), inputs(), fast_mode=True)


def test_masks_follow_the_seed_and_differ_between_calls():
    q, k, v = inputs()
    first = attend(3, q, k, v)
    assert not torch.equal(softmax_dropout_attention(q, k, v, None, False, RATE, 0.5), first)
    assert torch.equal(attend(3, q, k, v), first)


def test_checkpoints_draw_the_same_masks():
    q, k, v = inputs()
    grads = []
    for run in (lambda f, *x: f(*x), lambda f, *x: checkpoint(f, *x, use_reentrant=False)):
        torch.manual_seed(4)
        y = run(lambda *x: softmax_dropout_attention(*x, None, False, RATE, 0.5), q, k, v)
        grads.append(torch.autograd.grad(y.square().sum(), (q, k, v)))
    for mine, theirs in zip(*grads, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("rate", [1.0, 1e-9])
def test_everything_and_nothing(rate):
    q, k, v = inputs()
    wanted = torch.zeros(B, H, N, P_V, dtype=q.dtype) if rate == 1 else attend(5, q, k, v, rate=0.0)
    torch.testing.assert_close(attend(6, q, k, v, rate=rate), wanted)


def test_keys_of_one_sequence_serve_all():
    q, k, v = inputs()
    one = attend(7, q, k[:1, :1], v[:1, :1])
    assert torch.equal(one, attend(7, q, k[:1, :1].expand_as(k), v[:1, :1].expand_as(v)))
    one.sum().backward()
    assert k.grad[1:].count_nonzero() == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")
def test_forward_mode_takes_the_formula():
    q, k, v = (x.detach() for x in inputs())
    direction = torch.ones_like(q)
    with forward_ad.dual_level():
        y = attend(8, forward_ad.make_dual(q, direction), k, v)
        slope = forward_ad.unpack_dual(y).tangent
    with formulas_only():  # the same masks
        near = [attend(8, q + step * direction, k, v) for step in (1e-6, -1e-6)]
    torch.testing.assert_close(slope, (near[0] - near[1]) / 2e-6, rtol=1e-6, atol=1e-8)


def test_the_memory_does_not_grow_with_the_weights():
    """Nothing that is saved for the backward pass has an entry for each weight."""
    q, k, v = inputs(torch.float32)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
        attend(9, q, k, v).sum()
    assert max(sizes) < B * H * N * S
