"""The steps of few launches give the numbers of the formulas; here on a CPU, where they are not taken."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.mechanisms.kernel_pca.functional import PursuitSettings, rpc_attention
from kernel_attention.mechanisms.kernel_pca.steps import pursuit_in_few_launches


@pytest.mark.parametrize("mask", [None, "right", "left"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("iterations", [1, 2, 4])
@pytest.mark.parametrize("symmetric", [True, False])
def test_outputs_and_gradients_equal_those_of_the_formulas(symmetric, iterations, is_causal, mask):
    k, v, q = torch.randn(3, 2, 3, 11, 5, dtype=torch.float64).unbind()
    real = None
    if mask is not None:
        real = torch.arange(11)[None] < torch.tensor([11, 4])[:, None]
        real = real if mask == "right" else real.flip(1)
    settings = PursuitSettings(iterations, 1.0, "released", real, is_causal)
    probe = torch.randn_like(v) if real is None else torch.randn_like(v) * real[:, None, :, None]
    found = []
    for by_steps in (True, False):
        leaves = [x.clone().requires_grad_() for x in ((k, v) if symmetric else (k, v, q))]
        query = None if symmetric else leaves[2]
        if by_steps:
            low = pursuit_in_few_launches(leaves[0], leaves[1], settings, q=query, dropout_p=0.0)
        else:
            low = rpc_attention(leaves[0], leaves[1], q=query, **settings._asdict())
        found.append([low * probe.abs().sign(), *torch.autograd.grad((low * probe).sum(), leaves)])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


def test_the_gradient_can_be_differentiated():
    k, v = torch.randn(2, 1, 1, 4, 3, dtype=torch.float64).unbind()
    settings = PursuitSettings(3, 1.0, "released", None, False)

    def low(k, v):
        return pursuit_in_few_launches(k, v, settings, q=None, dropout_p=0.0)

    torch.autograd.gradgradcheck(low, (k.requires_grad_(), v.requires_grad_()))
