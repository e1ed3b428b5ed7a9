"""Products whose sums stay in float32."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from kernel_attention.tensors.affine import exact_product
from kernel_attention.testing import counting_launches


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_product_of_rounded_matrices_is_that_of_their_exact_copies(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(2, 3, 300).to(dtype), torch.randn(2, 300, 4).to(dtype)
    found, exact = exact_product(a, b), a.double() @ b.double()
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert (found - exact).abs().max() < 300 * torch.finfo(found.dtype).eps * exact.abs().max()


def test_on_an_accelerator_it_is_one_launch_and_can_be_counted_and_differentiated():
    a, b = (torch.empty(2, 3, 3, device="meta", dtype=torch.bfloat16) for _ in range(2))
    with counting_launches() as counter:
        assert exact_product(a, b).dtype == torch.float32
    assert counter.launches == {"bmm": 1}
    with FlopCounterMode(display=False) as counter:
        exact_product(a, b)
    assert counter.get_total_flops() == 2 * 2 * 3**3
    (slope,) = torch.autograd.grad(exact_product(a.requires_grad_(), b).sum(), a)
    assert slope.dtype == torch.bfloat16
