"""The fused softmax attention: the gradients of the formula, at logits of any size, eager and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention import create_attention
from kernel_attention.tensors.softmax import attention as op
from kernel_attention.tensors.softmax.attention import fused_attention

B, H, N, S, P = 2, 3, 13, 11, 5


def formula(q: Tensor, k: Tensor, v: Tensor, *, mask=None, is_causal=False, scale=None) -> Tensor:
    logits = q @ k.mT * (q.size(-1) ** -0.5 if scale is None else scale)
    seen = torch.ones(logits.shape[-2:], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen if mask is None else seen & mask
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)
    return torch.where(seen.any(dim=-1, keepdim=True), weights, 0.0).nan_to_num(0.0) @ v


def masks() -> dict[str, dict]:
    empty = torch.rand(B, 1, N, S) < 0.6
    empty[:, :, 2] = False
    return {
        "all": {},
        "causal": {"is_causal": True},
        "scale": {"scale": 0.3},
        "keys": {"mask": torch.rand(B, 1, 1, S) < 0.6},
        "pattern": {"mask": torch.rand(N, S) < 0.8},
        "empty_rows": {"mask": empty},
    }


def gradients(call, q, k, v, **options) -> list[Tensor]:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    y = call(*leaves, **options)
    return [y, *torch.autograd.grad((y * torch.linspace(-1, 1, P, dtype=y.dtype)).sum(), leaves)]


@pytest.mark.parametrize("size", [1.0, 1e5], ids=["ordinary", "large"])  # 1e10 is past the limit in float64
@pytest.mark.parametrize("options", list(masks()))
def test_outputs_and_gradients_are_those_of_the_formula(options, size):
    options = masks()[options]
    q, k, v = (torch.randn(B, H, n, P, dtype=torch.float64) for n in (N, S, S))
    q, k = size * q, size * k
    if size > 1:  # whole numbers: logits are exact, so that both sides round the same
        q, k, v = q.round(), k.round(), v
    for ours, wanted in zip(
        gradients(fused_attention, q, k, v, **options), gradients(formula, q, k, v, **options), strict=True
    ):
        torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9 * size)


def test_slices_of_queries_add_up(monkeypatch):
    monkeypatch.setattr(op, "_SLICE", B * H * S * 3)  # three queries at a time
    test_outputs_and_gradients_are_those_of_the_formula("causal", 1e5)
    test_outputs_and_gradients_are_those_of_the_formula("empty_rows", 1e5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_large_logits_give_the_gradients_of_the_rounded_queries_and_keys(dtype):
    # Logits of 1e9, where float32 has steps of 64. What q, k and v are after rounding has exact gradients.
    q, k, v = (torch.randn(B, H, N, P).to(dtype) for _ in range(3))
    q, k = 3e4 * q, 3e4 * k
    single, double = (
        gradients(fused_attention, *(x.to(t) for x in (q, k, v))) for t in (dtype, torch.float64)
    )
    eps = torch.finfo(dtype).eps
    for ours, exact in zip(single[1:], double[1:], strict=True):
        assert ours.isfinite().all()
        assert (ours.double() - exact).norm() <= 8 * eps * exact.norm()


def test_ordinary_logits_take_the_fused_backward_bit_by_bit():
    q, k, v = (torch.randn(B, H, N, P) for _ in range(3))
    for ours, wanted in zip(
        gradients(fused_attention, q, k, v), gradients(scaled_dot_product_attention, q, k, v), strict=True
    ):
        assert torch.equal(ours, wanted)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3)], ids=["by_head", "by_token"])
@pytest.mark.parametrize("size", [0.2, 0.99, 1.01, 5.0])
def test_the_norms_of_heads_decide_in_every_layout(order, size):
    # Heads of norm 1 reach the limit at size 1. At 0.99 the norms of whole tokens are above it.
    unit = torch.nn.functional.normalize(torch.randn(B, H, N, P), dim=-1)
    q, k = (torch.empty_permuted(unit.shape, order).copy_(unit) for _ in range(2))
    k *= size * torch.finfo(torch.float32).eps ** -0.5
    assert op._has_small_logits(q, k, 1.0) == (size < 1)
    assert not op._has_small_logits(q, k * torch.nan, 1.0)


def test_the_backend_that_the_caller_chose_is_taken():
    q, k, v = (1e4 * torch.randn(B, H, N, P) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        ours = gradients(fused_attention, q, k, v)
        wanted = gradients(scaled_dot_product_attention, q, k, v)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))


@pytest.mark.parametrize("size", [1.0, 1e4])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_one_compiled_graph_serves_ordinary_and_large_logits(backend, size):
    torch.compiler.reset()
    layer = create_attention("symmetric", embed_dim=12, num_heads=3).double()
    compiled = torch.compile(layer, fullgraph=True, backend=backend)
    results = []
    for call in (compiled, layer):
        x = size * torch.linspace(-1, 1, 2 * 7 * 12, dtype=torch.float64).view(2, 7, 12).sin()
        x.requires_grad_()
        layer.zero_grad()
        call(x).sum().backward()
        results.append([x.grad, *(p.grad.clone() for p in layer.parameters())])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("scale", [1e3, 1e4])
def test_the_gradients_of_robust_attention_stay_of_their_size(scale):
    # In float32 the rows that saturate at one token differ by less than their rounding: no digit of the
    # gradient holds. Its size does: saturated weights pass the values' gradient on and nothing else.
    torch.manual_seed(0)
    layer = create_attention("rpc", embed_dim=32, num_heads=4)
    x = (scale * torch.randn(2, 32, 32)).requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.abs().max() < 1e3  # float64 has 35 and 31
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@pytest.mark.parametrize(
    ("seen", "size"), [(None, 1.0), ((N, S), 1e6), ((B, 1, 1, S), 1.0)], ids=["all", "pattern", "keys"]
)
def test_the_operators_are_what_they_tell_the_compiler(seen, size):
    q, k, v = (torch.randn(B, n, H, P).transpose(1, 2) for n in (N, S, S))
    mask = None if seen is None else op.additive_mask(torch.rand(seen) < 0.7, q)
    arguments = (size * q, size * k, v, mask, False, 0.5)
    torch.library.opcheck(op._attention, arguments)
    out, lse = op._attention(*arguments)
    torch.library.opcheck(
        op._attention_backward, (torch.randn_like(out), *arguments[:3], out, lse, *arguments[3:])
    )


@pytest.mark.parametrize("size", [1.0, 1e4], ids=["ordinary", "large"])
def test_an_eager_call_gives_the_bits_of_the_operator(size):
    q, k, v = (torch.randn(B, H, n, P) for n in (N, S, S))
    mask = torch.rand(N, S) < 0.7

    def operator(q, k, v, mask):
        return op._attention(q, k, v, op.additive_mask(mask, q), False, P**-0.5)[0]

    for eager, wanted in zip(
        gradients(fused_attention, size * q, size * k, v, mask=mask),
        gradients(operator, size * q, size * k, v, mask=mask),
        strict=True,
    ):
        assert torch.equal(eager, wanted)


def test_tensors_without_values_have_gradients_without_values():
    with FakeTensorMode():
        q, k, v = (torch.randn(B, H, n, P, requires_grad=True) for n in (N, S, S))
        fused_attention(q, k, v).sum().backward()
        assert q.grad.shape == (B, H, N, P)
        assert k.grad.shape == v.grad.shape == (B, H, S, P)


@pytest.mark.parametrize("size", [1.0, 1e5], ids=["ordinary", "large"])
@pytest.mark.parametrize("options", list(masks()))
def test_gradients_that_are_differentiated_again_are_those_of_the_formula(options, size):
    options = masks()[options]
    q, k, v = (torch.randn(B, H, n, P, dtype=torch.float64) for n in (N, S, S))
    q, k = size * q, size * k
    if size > 1:  # as above
        q, k = q.round(), k.round()
    first = {}
    for call in (fused_attention, formula):
        leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
        first[call] = torch.autograd.grad(call(*leaves, **options).square().sum(), leaves, create_graph=True)
    torch.testing.assert_close(first[fused_attention], first[formula], rtol=1e-9, atol=1e-9 * size)


@pytest.mark.parametrize("options", list(masks()))
def test_second_derivatives_equal_finite_differences(options):
    options = masks()[options]
    leaves = [torch.randn(B, H, n, P, dtype=torch.float64, requires_grad=True) for n in (N, S, S)]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v: fused_attention(q, k, v, **options), leaves, fast_mode=True
    )


def test_a_part_of_the_inputs_can_be_differentiated_twice():
    q, k, v = (torch.randn(B, H, n, P, dtype=torch.float64) for n in (N, S, S))
    q.requires_grad_()
    (slope,) = torch.autograd.grad(fused_attention(q, k, v).square().sum(), q, create_graph=True)
    slope.square().sum().backward()
    assert q.grad.isfinite().all()
    assert q.grad.any()


def test_a_gradient_penalty_trains_softmax_attention():
    layer = create_attention("softmax", embed_dim=12, num_heads=3)
    x = torch.randn(2, 7, 12, requires_grad=True)
    mask = torch.arange(7) < torch.tensor([[7], [4]])
    (slope,) = torch.autograd.grad(layer(x, attention_mask=mask).square().sum(), x, create_graph=True)
    slope.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_this_release_of_torch_has_the_operators_as_they_are_called():
    assert op._EXISTS


def test_another_release_without_them_gets_what_torch_has(monkeypatch):
    assert not op._takes("_scaled_dot_product_flash_attention_for_cpu", "query key value")
    assert not op._takes("_no_such_attention", op._FORWARD)
    monkeypatch.setattr(op, "_EXISTS", False)
    q, k, v = (torch.randn(B, H, N, P) for _ in range(3))
    for ours, wanted in zip(
        gradients(fused_attention, q, k, v), gradients(scaled_dot_product_attention, q, k, v), strict=True
    ):
        assert torch.equal(ours, wanted)
