"""The pass of few launches gives the numbers of the formulas; here on a CPU, where it is not taken."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.mechanisms.linear.functional import linear_attention
from kernel_attention.mechanisms.linear.joint import linear_pass
from kernel_attention.tensors.features.feature_maps import cosine, elu, identity, relu


def _by_formulas(z, feature_map, normalize, mask, is_causal):
    q, k, v = z.permute(2, 0, 3, 1, 4)
    return linear_attention(
        q, k, v, feature_map=feature_map, normalize=normalize, attention_mask=mask, is_causal=is_causal
    ).transpose(1, 2)


@pytest.mark.parametrize("form", ["whole", "padded", "causal", "causal chunks", "causal whole chunks"])
@pytest.mark.parametrize(
    ("feature_map", "normalize"),
    [(elu, True), (elu, False), (relu, True), (cosine, False), (identity, False)],
)
def test_outputs_and_gradients_equal_those_of_the_formulas(feature_map, normalize, form):
    length = {"causal chunks": 301, "causal whole chunks": 256}.get(form, 13)
    z = torch.randn(2, length, 3, 3, 5, dtype=torch.float64)
    if feature_map is relu:  # a query without any weight
        z[0, 3, 0] = -z[0, 3, 0].abs()
    mask = torch.arange(length)[None] < torch.tensor([length, 4])[:, None] if form == "padded" else None
    options = feature_map, normalize, mask, form.startswith("causal")
    probe = torch.randn(2, length, 3, 5, dtype=torch.float64)
    found = []
    for call in (linear_pass, _by_formulas):
        leaf = z.clone().requires_grad_()
        y = call(leaf, *options)
        (y * probe).sum().backward()
        found.append((y, leaf.grad))
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("form", ["whole", "padded", "causal"])
@pytest.mark.parametrize(("feature_map", "normalize"), [(elu, True), (cosine, False), (identity, False)])
def test_a_map_between_the_features_is_one_of_the_queries_features(feature_map, normalize, form):
    z = torch.randn(2, 13, 3, 3, 5, dtype=torch.float64, requires_grad=True)
    between = torch.rand(3, 5, 5, dtype=torch.float64, requires_grad=True)
    mask = torch.arange(13)[None] < torch.tensor([13, 4])[:, None] if form == "padded" else None
    q, k, v = z.permute(2, 0, 3, 1, 4)
    q, k = feature_map(q) @ between, feature_map(k)
    options = {"normalize": normalize, "attention_mask": mask, "is_causal": form == "causal"}
    expected = linear_attention(q, k, v, feature_map=identity, **options).transpose(1, 2)
    y = linear_pass(z, feature_map, normalize, mask, form == "causal", between)
    found = [[out, *torch.autograd.grad(out.sin().sum(), (z, between))] for out in (y, expected)]
    torch.testing.assert_close(found[0], found[1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_gradient_can_be_differentiated(is_causal):
    z = torch.randn(1, 5, 3, 1, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradgradcheck(lambda z: linear_pass(z, elu, True, None, is_causal), (z,))


def test_half_precision_sums_more_than_it_holds():
    z = torch.rand(1, 4096, 3, 1, 4).add_(8.0).half()
    y = linear_pass(z, elu, True, None, False)
    assert y.dtype == torch.float16
    assert y.isfinite().all()
