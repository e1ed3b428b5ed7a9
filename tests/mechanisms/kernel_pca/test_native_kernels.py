"""RPC-Attention's recursion in C++ gives the numbers of the one in PyTorch, however the rows are divided."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention.mechanisms.kernel_pca.engines import cpu as op
from kernel_attention.native import find_compiler

pytestmark = [
    pytest.mark.usefixtures("restored_threads"),
    pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler"),
]
F64 = torch.float64
N = 13  # tokens, a prime
TOLERANCE = {"rtol": 1e-10, "atol": 1e-11}
MASKS = {
    "": None,
    "right": torch.arange(N) < torch.tensor([[N], [5], [2]]),
    "holes": torch.rand(3, N, generator=torch.Generator().manual_seed(1)) < 0.7,
}


def make(width: int = 15, heads: int = 3, dtype: torch.dtype = F64, **options) -> ka.RobustPrincipalAttention:
    """A layer that cuts about half of the residuals off."""
    torch.manual_seed(0)
    return ka.RobustPrincipalAttention(width, heads, **{"lam": 1.0, **options}).to(dtype)


def step(layer, x: Tensor, impl: str, mask: Tensor | None = None, *, is_causal: bool = False) -> list[Tensor]:
    """Output at the real tokens, and the gradients of a training step."""
    layer.impl = impl
    layer.zero_grad(set_to_none=True)
    x = x.detach().requires_grad_()
    real = torch.ones(x.shape[:2], dtype=torch.bool) if mask is None else mask
    y = layer(x, attention_mask=mask, is_causal=is_causal)[real]
    y.sin().sum().backward()
    return [y.detach(), x.grad[real], *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("iterations", [1, 2, 3, 6, 10])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["", "causal"])
def test_outputs_and_gradients(iterations, symmetric, mask, is_causal):
    layer, x = make(iterations=iterations, symmetric=symmetric), torch.randn(3, N, 15, dtype=F64)
    ours, wanted = (
        step(layer, x, impl, MASKS[mask], is_causal=is_causal) for impl in ("native", "reference")
    )
    torch.testing.assert_close(ours, wanted, **TOLERANCE)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
@pytest.mark.parametrize(("batch", "width", "heads"), [(1, 64, 2), (2, 12, 12), (5, 7, 1), (3, 34, 2)])
def test_slices_of_any_number_of_threads(threads, batch, width, heads, monkeypatch):
    monkeypatch.setattr(op, "_SLICE", 1)
    torch.set_num_threads(threads)
    layer, x = make(width, heads), torch.randn(batch, 101, width, dtype=F64)
    torch.testing.assert_close(step(layer, x, "native"), step(layer, x, "fused"), **TOLERANCE)


def test_values_of_padding_are_not_read():
    layer, x = make(), torch.randn(3, N, 15, dtype=F64)
    mask = MASKS["holes"]
    expected = step(layer, x, "fused", mask)
    hidden = x.masked_fill(~mask[..., None], 1e3)
    torch.testing.assert_close(step(layer, hidden, "native", mask), expected, **TOLERANCE)


def test_a_number_that_is_none_stays_visible():
    layer, x = make(impl="native"), torch.randn(3, N, 15, dtype=F64)
    x[1, 4, 2] = torch.nan
    y = layer(x)
    assert y[1].isnan().all()
    assert y[::2].isfinite().all()


def test_float32_is_as_near_to_float64_as_the_formulas_in_float32():
    layer, x = make(64, 2), torch.randn(3, 101, 64, dtype=F64)
    exact = step(layer, x, "reference")
    errors = {}
    for impl in ("reference", "native"):
        pairs = zip(step(make(64, 2, torch.float32), x.float(), impl), exact, strict=True)
        errors[impl] = [(one.double() - other).norm() / other.norm().clamp(min=1e-6) for one, other in pairs]
    for native, reference in zip(errors["native"], errors["reference"], strict=True):
        assert native < 2 * reference + 16 * torch.finfo(torch.float32).eps


def test_a_step_repeated_has_the_same_bits():
    torch.set_num_threads(2)
    layer, x = make(dtype=torch.float32), torch.randn(3, 101, 15)
    for one, other in zip(step(layer, x, "native"), step(layer, x, "native"), strict=True):
        assert torch.equal(one, other)


def test_a_compiled_step_has_the_kernels_and_their_numbers():
    layer, x = make(impl="native"), torch.randn(3, N, 15, dtype=F64)
    found = []
    for call in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        layer.zero_grad(set_to_none=True)
        y = call(x)
        y.sin().sum().backward()
        found.append([y.detach(), *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found)


def test_second_derivatives_come_from_the_formulas():
    layer, x = make(impl="native", iterations=2), torch.randn(1, 5, 15, dtype=F64, requires_grad=True)
    assert torch.autograd.gradgradcheck(layer, x, fast_mode=True)


def test_tensors_without_values():
    layer = make(dtype=torch.float32, impl="native").to("meta")
    x = torch.randn(2, 300, 15, device="meta", requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.shape == x.shape


def test_no_sequences():
    assert make(impl="native")(torch.randn(0, 5, 15, dtype=F64)).shape == (0, 5, 15)


def test_what_the_kernels_cannot_do_is_refused():
    layer, x = make(dtype=torch.float32, impl="native"), torch.randn(1, N, 15)
    with pytest.raises(ka.InputError, match="float32 and float64, and the input is in bfloat16"):
        layer.bfloat16()(x.bfloat16())
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(ka.InputError, match="the input is in bfloat16; use impl='auto'"),
    ):
        layer.float()(x)
    layer.dropout = 0.1
    with pytest.raises(ka.InputError, match="impl='native': the faster forms have no dropout"):
        layer(x)


def test_auto_never_asks_for_a_compiler():
    assert make().plan(torch.randn(1, N, 15)).form == "fused"
