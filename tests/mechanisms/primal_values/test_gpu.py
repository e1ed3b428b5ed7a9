"""The form of few launches gives the numbers of the formulas; here on a CPU, where it is not taken."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import create_attention
from kernel_attention.mechanisms.primal_values.gpu import (
    ValueOptions,
    causal_values_launches,
    primal_values_launches,
)


def _layer(feature_map: str, eta: float, normalize: str) -> torch.nn.Module:
    torch.manual_seed(0)
    layer = create_attention(
        "primal_values", embed_dim=10, num_heads=2, rank=3, feature_map=feature_map, eta=eta,
        normalize=normalize, dtype=torch.float64,
    )  # fmt: skip
    with torch.no_grad():
        for parameter in layer.kernel.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return layer


@pytest.mark.parametrize("normalize", ["output", "keys"])
@pytest.mark.parametrize("eta", [0.0, 0.1])
@pytest.mark.parametrize("form", ["whole", "padded", "causal"])
@pytest.mark.parametrize("feature_map", ["cosine", "identity"])
def test_outputs_and_gradients_equal_those_of_the_formulas(feature_map, form, eta, normalize):
    layer = _layer(feature_map, eta, normalize)
    kernel = layer.kernel
    z = torch.randn(3, 13, 3, 2, 5, dtype=torch.float64)
    mask = torch.arange(13)[None] < torch.tensor([13, 4, 1])[:, None] if form == "padded" else None
    launches = causal_values_launches if form == "causal" else primal_values_launches
    real = torch.ones(3, 13, dtype=torch.bool) if mask is None else mask
    probes = torch.randn(3, 13, 10, dtype=torch.float64), torch.randn(3, dtype=torch.float64)
    found = []
    for by_form in (True, False):
        leaf = z.clone().requires_grad_()
        if by_form:
            options = ValueOptions(kernel.feature_map, mask, normalize == "output", eta > 0)
            y, value = launches(leaf, kernel.w_e, kernel.w_r, kernel.sqrt_lambda, options)
        else:
            heads, objective = layer._heads(*leaf.permute(2, 0, 3, 1, 4), mask, form == "causal", True)
            y, value = layer.merge_heads(heads), None if objective is None else objective.value
        loss = (y * probes[0])[real].sum()
        loss = loss if value is None else loss + (value * probes[1]).sum()
        grads = torch.autograd.grad(loss, [leaf, *kernel.parameters()])
        found.append((y[real], *grads, *([] if value is None else [value.detach()])))
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_can_be_differentiated(is_causal):
    kernel = _layer("cosine", 0.1, "output").kernel
    mask = None if is_causal else torch.arange(4)[None] < torch.tensor([4, 2])[:, None]
    launches = causal_values_launches if is_causal else primal_values_launches
    options = ValueOptions(kernel.feature_map, mask, True, True)
    z = torch.randn(2, 4, 3, 2, 5, dtype=torch.float64, requires_grad=True)

    def output(*inputs):
        return launches(*inputs, options)[0]

    weights = [each.detach().requires_grad_() for each in (kernel.w_e, kernel.w_r, kernel.sqrt_lambda)]
    assert torch.autograd.gradgradcheck(output, (z, *weights), fast_mode=True)
