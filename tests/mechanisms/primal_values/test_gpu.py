"""The form of few launches gives the numbers of the formulas; here on a CPU, where it is not taken."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import create_attention
from kernel_attention.mechanisms.primal_values.engines.gpu import primal_values_launches


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("feature_map", ["cosine", "identity"])
def test_outputs_and_gradients_equal_those_of_the_formulas(feature_map, padded):
    torch.manual_seed(0)
    kernel = create_attention(
        "primal_values", embed_dim=10, num_heads=2, rank=3, feature_map=feature_map, dtype=torch.float64
    ).kernel
    with torch.no_grad():
        for parameter in kernel.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    z = torch.randn(3, 13, 3, 2, 5, dtype=torch.float64)
    mask = torch.arange(13)[None] < torch.tensor([13, 4, 1])[:, None] if padded else None
    probe = torch.randn(3, 2, 13, 5, dtype=torch.float64)
    found = []
    for by_form in (True, False):
        leaf = z.clone().requires_grad_()
        if by_form:
            y, *_ = primal_values_launches(
                leaf, kernel.w_e, kernel.w_r, kernel.sqrt_lambda, feature_map=kernel.feature_map,
                attention_mask=mask,
            )  # fmt: skip
        else:
            q, k, v = leaf.permute(2, 0, 3, 1, 4)
            y = kernel(q, k, v, attention_mask=mask)
        grads = torch.autograd.grad((y * probe).sum(), [leaf, *kernel.parameters()])
        found.append((y, *grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-10, atol=1e-11)
