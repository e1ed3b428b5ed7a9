"""Rows divided by their norms: right at every size, differentiable any number of times, cheap to keep."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from kernel_attention.tensors.unit_rows import inverse_norms, unit_rows, unit_rows_back, wide_norms

F64 = torch.float64
P = 5
# Rows whose squares vanish or overflow in float32 among them.
SIZES = [1e-28, 1e-25, 1e-20, 1e-3, 1.0, 1e4, 1e18, 1e25, 1e36]


def rows(sizes: list[float], dtype: torch.dtype = F64) -> Tensor:
    drawn = torch.randn(len(sizes), P, dtype=F64, generator=torch.Generator().manual_seed(0))
    return (drawn * torch.tensor(sizes, dtype=F64)[:, None]).to(dtype)


def with_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
    """The unit rows, and the gradient of a fixed combination of them."""
    x = x.detach().requires_grad_()
    unit = unit_rows(x)
    probe = torch.randn(x.shape, dtype=F64, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    return unit.detach(), torch.autograd.grad(unit, x, probe)[0]


@pytest.mark.parametrize("sizes", [SIZES, SIZES[3:7], [0.0, *SIZES]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equal_to_float64_at_every_size(sizes, dtype):
    x = rows(sizes, dtype)
    unit, gradient = with_gradient(x)
    exact, slope = with_gradient(x.double())
    norm = x.double().norm(dim=-1, keepdim=True)
    # A few roundings of numbers up to 1; the gradient has the unit 1 / norm.
    bound = 8 * torch.finfo(dtype).eps
    assert (unit - exact).abs().max() < bound
    assert ((gradient.double() - slope) * norm).abs().max() < bound * P
    assert not unit[norm[:, 0] == 0].any()
    assert not gradient[norm[:, 0] == 0].any()


@pytest.mark.parametrize("other", [0.0, 1e-36, 1e36, math.inf, math.nan])
def test_what_other_rows_hold_changes_no_bit_of_a_row(other):
    x = rows(SIZES[3:7], torch.float32)
    alone = with_gradient(torch.cat([x, torch.ones(1, P)]))
    beside = with_gradient(torch.cat([x, torch.full((1, P), other)]))
    for one, two in zip(alone, beside, strict=True):
        assert torch.equal(one[: len(x)], two[: len(x)])


def test_first_and_second_derivatives_equal_finite_differences():
    x = rows([1e-2, 1.0, 30.0]).requires_grad_()
    assert torch.autograd.gradcheck(unit_rows, x, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(unit_rows, x)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own forward mode
def test_transforms_and_forward_mode_differentiate_it():
    x, tangent = rows([1e-2, 1.0, 30.0]), rows([1.0, 2.0, 3.0])
    jacobian = torch.autograd.functional.jacobian(unit_rows, x)
    torch.testing.assert_close(torch.func.jacrev(unit_rows)(x), jacobian)
    expected = (jacobian * tangent).sum(dim=(-2, -1))
    torch.testing.assert_close(torch.func.jvp(unit_rows, (x,), (tangent,))[1], expected)
    with forward_ad.dual_level():
        found = forward_ad.unpack_dual(unit_rows(forward_ad.make_dual(x, tangent))).tangent
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(torch.func.vmap(unit_rows)(x), unit_rows(x))


def test_compiled_without_a_break():
    torch.compiler.reset()
    compiled = torch.compile(unit_rows, fullgraph=True, backend="aot_eager")
    x = rows(SIZES[3:7], torch.float32).requires_grad_()
    torch.testing.assert_close(compiled(x), unit_rows(x))


@pytest.mark.parametrize("shape", [(0, P), (2, 0, P)])
def test_no_rows(shape):
    x = torch.empty(shape, requires_grad=True)
    assert torch.autograd.grad(unit_rows(x).sum(), x)[0].shape == shape
    assert unit_rows(torch.empty(3, P, device="meta")).shape == (3, P)


def test_nothing_but_the_rows_and_their_norms_is_kept_for_the_backward_pass():
    x, saved = torch.randn(100, 16, requires_grad=True), {}

    def keep(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        unit_rows(x)
    assert sum(saved.values()) <= x.numel() + x.size(0)


def test_ignored_rows_decide_nothing():
    x = rows(SIZES[3:7], torch.float32)
    ignored = torch.tensor([[False], [False], [False], [True]])
    held = x.clone()
    held[3] = math.nan
    assert torch.equal(inverse_norms(held, ignored=ignored)[:3], inverse_norms(x)[:3])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_the_form_of_accelerators_equals_the_others_at_every_size(dtype):
    # It asks nothing; here it runs on a CPU, where it is not taken.
    rows = torch.randn(5, 3, dtype=torch.float64)
    for size in (1e-45, 1e-30, 1e-20, 1e-3, 1.0, 1e4, 1e20, 1e37, 1e-160, 1e160):
        x = (rows * size).to(dtype)
        x[2] = 0.0
        if not x.isfinite().all():
            continue
        leaf, grad = x.clone().requires_grad_(), torch.randn_like(x)
        y = unit_rows(leaf)
        (expected,) = torch.autograd.grad(y, leaf, grad)
        norm = wide_norms(x)
        unit = torch.div(x, norm, out=torch.empty_like(x))
        torch.testing.assert_close(unit, y)
        found = unit_rows_back(unit, norm, grad, torch.empty_like(x))
        kept = expected.isfinite() & found.isfinite()
        tolerance = {"rtol": 0.05, "atol": 0.05 / max(size, 1e-7)} if dtype.itemsize == 2 else {}
        torch.testing.assert_close(found[kept], expected[kept], **tolerance)
