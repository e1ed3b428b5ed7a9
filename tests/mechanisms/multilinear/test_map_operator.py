"""The operator of the one-product form: what compilers are told of it is true."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernel_attention.mechanisms.multilinear import map_operator as op

F64 = torch.float64
B, N, J, P, D = 3, 11, 4, 5, 7

# The same products, whose operands may lie at other addresses.
TOLERANCE = {
    F64: {"rtol": 1e-12, "atol": 1e-12},
    torch.float32: {"rtol": 1e-5, "atol": 1e-5},
    torch.bfloat16: {"rtol": 0.02, "atol": 0.02},
}
CASES = {
    "plain": {},
    "shared_maps": {"sequences": 1},
    "grams": {"with_grams": True},
    "identity": {"normalize": False},
    "identity_grams": {"normalize": False, "with_grams": True, "sequences": 1},
    "bfloat16": {"dtype": torch.bfloat16, "with_grams": True},
}


def arguments(
    *, dtype: torch.dtype = F64, sequences: int = B, normalize: bool = True, with_grams: bool = False
) -> tuple:
    """Of ``multilinear_map``."""
    torch.manual_seed(0)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    sizes = (J, P, D), (B, J, P), (sequences, J, P, D), (D,)
    tensors = [torch.randn(size, dtype=exact) for size in sizes]
    return (torch.randn(B, N, D, dtype=dtype), *tensors, torch.full((B,), N), normalize, with_grams)


def with_leaves(inputs: tuple) -> tuple:
    """The same, of tensors that want gradients."""
    return tuple(
        x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs
    )


def operator(*inputs) -> tuple[Tensor, ...]:
    y, grams, *_ = op._map(*inputs)
    return (y, grams) if inputs[-1] else (y,)


def eager(*inputs) -> tuple[Tensor, ...]:
    y, grams = op._EagerMap.apply(*inputs, None)
    return (y,) if grams is None else (y, grams)


@pytest.mark.parametrize("case", ["grams", "identity_grams"])
def test_the_operators_are_what_they_tell_the_compiler(case):
    inputs = arguments(**CASES[case])
    # Its graph with symbolic sizes is run in test_compiled_passes.py.
    parts = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(op._map, with_leaves(inputs), test_utils=parts)
    y, grams, *kept = op._map(*inputs)
    x, weight, level, maps, _, count, normalize, with_grams = inputs
    grad_grams = torch.randn_like(grams) if with_grams else None
    torch.library.opcheck(
        op._map_backward,
        (torch.randn_like(y), grad_grams, x, weight, level, maps, count, kept, normalize, with_grams),
        test_utils=("test_schema", "test_faketensor"),  # it has no gradient of its own
    )


@pytest.mark.parametrize("case", CASES)
def test_an_eager_call_gives_the_numbers_of_the_operator(case):
    results = []
    for call in (eager, operator):
        leaves = with_leaves(arguments(**CASES[case]))
        outputs = call(*leaves)
        total = sum(
            (output.double() * torch.linspace(-1, 1, output.size(-1), dtype=F64)).sum() for output in outputs
        )
        results.append([*outputs, *torch.autograd.grad(total, leaves[:5])])
    for ours, wanted in zip(*results, strict=True):
        torch.testing.assert_close(ours, wanted, **TOLERANCE[ours.dtype])


@pytest.mark.parametrize("call", [eager, operator], ids=["eager", "operator"])
@pytest.mark.parametrize("case", ["plain", "shared_maps", "grams", "identity_grams"])
def test_first_and_second_derivatives_equal_finite_differences(case, call):
    inputs = with_leaves(arguments(**CASES[case]))
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("call", [eager, operator], ids=["eager", "operator"])
def test_outputs_that_nothing_reads_have_no_part_in_the_gradient(call):
    leaves = with_leaves(arguments(with_grams=True))
    outputs = call(*leaves)
    whole, *parts = (
        torch.autograd.grad(sum(output.sum() for output in chosen), leaves[0], retain_graph=True)[0]
        for chosen in (outputs, outputs[:1], outputs[1:])
    )
    torch.testing.assert_close(sum(parts), whole)
