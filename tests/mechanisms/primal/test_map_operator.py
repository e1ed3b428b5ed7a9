"""The operator of the one-pass form: what compilers are told of it is true."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.cpu import SLICES
from kernel_attention.mechanisms.primal.map_operator import MapOperator
from kernel_attention.mechanisms.primal.native import UNITS

F64 = torch.float64
B, N, H, P, D = 3, 11, 2, 5, 7  # the width of the input need not be that of the heads


def arguments(
    *, dtype: torch.dtype = F64, groups: int = H, sequences: int = B, bias: bool = True, mask: bool = False,
    normalize: bool = True, with_gram: bool = True,
) -> tuple:  # fmt: skip
    """Of ``primal_map``; o = 3 outputs of a group."""
    torch.manual_seed(0)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    tensors = [torch.randn(B, N, D, dtype=dtype), torch.randn(2 * H * P, D, dtype=dtype)]
    tensors += [torch.randn(2 * H * P, dtype=dtype) if bias else None]
    tensors += [torch.randn(sequences, groups, 2 * H * P // groups, 3, dtype=exact)]
    tensors += [torch.randn(3 * groups, dtype=exact)]
    real = torch.rand(B, N) < 0.7 if mask else None
    return (*tensors, real, H, normalize, with_gram)


# The same products, whose operands may lie at other addresses.
TOLERANCE = {
    F64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.02, "atol": 0.02},
}
CASES = {
    "per_head": {},
    "folded": {"groups": 1},
    "shared_maps": {"sequences": 1},
    "mask": {"mask": True},
    "no_bias": {"bias": False},
    "no_gram": {"with_gram": False},
    "identity": {"normalize": False, "mask": True},
    "bfloat16": {"dtype": torch.bfloat16, "mask": True},
    "native": {"mask": True},
}


@pytest.fixture
def op(case, request) -> MapOperator:
    if case != "native":
        return SLICES
    request.getfixturevalue("built_engines")
    return UNITS


def with_leaves(inputs: tuple) -> tuple:
    """The same, of tensors that want gradients."""
    return tuple(
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )


@pytest.mark.parametrize("case", CASES)
def test_the_operators_are_what_they_tell_the_compiler(case, op):
    inputs = with_leaves(arguments(**CASES[case]))
    # Tracing with symbolic sizes takes seconds: once.
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    parts += ("test_aot_dispatch_dynamic",) if case == "mask" else ()
    torch.library.opcheck(op.operator, inputs, test_utils=parts)
    x, weight, bias, maps, _, mask, heads, normalize, with_gram = arguments(**CASES[case])
    y, gram = op.operator(*inputs)
    pull = gram.detach().to(x.dtype) if with_gram else None
    torch.library.opcheck(
        op.backward,
        (x, weight, bias, maps, pull, torch.randn_like(y), mask, heads, normalize),
        test_utils=("test_schema", "test_faketensor"),  # it has no gradient of its own
    )


def found(call: Callable, inputs: tuple) -> list[Tensor]:
    """Outputs and gradients of a fixed combination of both."""
    leaves = with_leaves(inputs)
    y, gram = call(*leaves)
    wanted = [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]
    total = (y.double() * torch.linspace(-1, 1, y.size(2), dtype=F64)).sum() + gram.double().sin().sum()
    return [y.detach(), gram.detach(), *torch.autograd.grad(total, wanted)]


@pytest.mark.parametrize("case", CASES)
def test_an_eager_call_gives_the_numbers_of_the_operator(case, op):
    inputs = arguments(**CASES[case])
    for eager, wanted in zip(found(op.eager, inputs), found(op.operator, inputs), strict=True):
        torch.testing.assert_close(eager, wanted, **TOLERANCE[eager.dtype])


@pytest.mark.parametrize("how", ["operator", "eager"])
@pytest.mark.parametrize("case", ["per_head", "folded", "mask", "identity", "native"])
def test_first_and_second_derivatives_equal_finite_differences(case, op, how):
    call = op.operator if how == "operator" else op.eager
    inputs = with_leaves(arguments(**CASES[case]))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


def test_outputs_that_nothing_reads_have_no_part_in_the_gradient():
    for call in (SLICES.operator, SLICES.eager):
        leaves = with_leaves(arguments())
        y, gram = call(*leaves)
        whole = torch.autograd.grad(y.sum() + gram.sum(), leaves[0], retain_graph=True)[0]
        parts = [torch.autograd.grad(part.sum(), leaves[0], retain_graph=True)[0] for part in (y, gram)]
        torch.testing.assert_close(sum(parts), whole)
