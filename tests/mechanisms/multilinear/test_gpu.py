"""The form of few launches gives the numbers of the formulas; here on a CPU, where it is not taken."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import MultilinearAttention
from kernel_attention.mechanisms.multilinear.gpu import (
    Terms,
    joint_factors,
    mode_grams,
    multilinear_launches,
    objective_launches,
)
from kernel_attention.mechanisms.multilinear.objective import kmlsvd_objective
from kernel_attention.tensors.multilinear.factors import multilinear_factors
from kernel_attention.tensors.multilinear.unfoldings import mode_gram

LENGTH, HEADS, WIDTH = 13, 2, 10


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"order": 2}, {"order": 4, "rank": 2}, {"feature_map": "cosine"}, {"feature_map": "identity"}],
)
def test_outputs_grams_and_gradients_equal_those_of_the_formulas(options, padded):
    torch.manual_seed(0)
    layer = MultilinearAttention(WIDTH, HEADS, dtype=torch.float64, **{"rank": 3, **options})
    x = torch.randn(2, LENGTH, WIDTH, dtype=torch.float64)
    mask = torch.arange(LENGTH)[None] < torch.tensor([LENGTH, 4])[:, None] if padded else None
    probe = torch.randn_like(x) if mask is None else torch.randn_like(x) * mask[..., None]
    found = []
    for by_form in (True, False):
        leaf = x.clone().requires_grad_()
        factors = layer.factors()[1]
        if by_form:
            z = torch.stack([each.transpose(1, 2) for each in layer.sequences(leaf)], dim=2)
            concat = layer.concat.weight, layer.concat.bias
            y, features = multilinear_launches(
                z, torch.stack(factors), concat, feature_map=layer.feature_map, attention_mask=mask
            )
            grams = mode_grams(features, layer.order)
        else:
            modes = layer._modes(leaf, factors, mask, False, True)
            y, grams = layer.merge_heads(layer._join(modes)), modes.grams
        loss = (y * probe).sum() + sum((n + 1) * gram.sin().sum() for n, gram in enumerate(grams))
        grads = torch.autograd.grad(loss, [leaf, *layer.parameters()], materialize_grads=True)
        found.append((y if mask is None else y[mask], torch.stack(list(grams)), *grads))
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mean", [None, 13, torch.tensor([13, 4])], ids=["sum", "number", "tensor"])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_the_objective_and_its_gradients_equal_those_of_the_formula(order, mean):
    torch.manual_seed(0)
    layer = MultilinearAttention(WIDTH, HEADS, order=order, rank=3, dtype=torch.float64)
    # the core's S_(n) S_(n)^T have full rank, where the two pseudo-inverses agree to their last digits
    core = torch.randn(layer.core.shape, dtype=torch.float64)
    features = torch.randn(HEADS, 2, LENGTH, order * WIDTH // HEADS, dtype=torch.float64)
    found = []
    for by_form in (True, False):
        leaves = [each.detach().clone().requires_grad_() for each in (features, layer.w, core)]
        weights = leaves[1].unbind()
        if by_form:
            factors, unfolded = joint_factors(leaves[1], leaves[2])
            value = objective_launches(Terms(leaves[0], leaves[1], unfolded, factors), mean)
        else:
            factors = multilinear_factors(weights, leaves[2])
            grams = list(mode_grams(leaves[0], order).unbind())
            value = kmlsvd_objective(grams, weights, leaves[2], factors=factors, num_tokens=mean)
        once = torch.autograd.grad(value.sin(), leaves, retain_graph=True)
        first = torch.autograd.grad(value.sin(), leaves, create_graph=True)
        second = torch.autograd.grad(sum(each.square().sum() for each in first), leaves)
        found.append([value, *once, *first, *second])
    torch.testing.assert_close(found[0], found[1], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("mean", [None, 13, torch.tensor([13, 4])], ids=["sum", "number", "tensor"])
@pytest.mark.parametrize("order", [2, 3, 4])
def test_features_of_16_bits_are_rounded_once_on_the_way_back(order, mean):
    torch.manual_seed(0)
    features = torch.randn(HEADS, 2, LENGTH, order * 5, dtype=torch.float64).bfloat16()
    weights = torch.randn(2, order, HEADS, 5, 3)
    terms = Terms(features, weights[0], torch.randn(order, HEADS, 3, 3 ** (order - 1)), weights[1])
    found = []
    for dtype in (None, torch.float64):
        leaves = [each.detach().to(dtype or each.dtype).requires_grad_() for each in terms]
        value = objective_launches(Terms._make(leaves), mean)
        found.append([value, *torch.autograd.grad(value, leaves)])
    (value, slope, *slopes), (exact, exact_slope, *exact_slopes) = found
    assert slope.dtype == torch.bfloat16
    # The Gram matrices' gradient and the result are rounded, 2^-8 each at most.
    assert (slope.double() - exact_slope).norm() < 2.0**-7 * exact_slope.norm()
    for each, expected in zip([value, *slopes], [exact, *exact_slopes], strict=True):
        assert (each.double() - expected).norm() < 1e-4 * expected.norm()


def test_the_gradient_can_be_differentiated():
    z = torch.randn(1, 3, 2, 1, 2, dtype=torch.float64, requires_grad=True)
    factors = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    concat = torch.randn(2, 4, dtype=torch.float64), None
    for name in ("frobenius", "cosine"):
        feature_map = MultilinearAttention(2, 1, order=2, feature_map=name).feature_map

        def heads(z, feature_map=feature_map):
            return multilinear_launches(z, factors, concat, feature_map=feature_map, attention_mask=None)[0]

        torch.autograd.gradgradcheck(heads, (z,))


@pytest.mark.parametrize("order", [2, 3, 4])
def test_the_joint_factors_and_their_gradients_equal_those_of_the_formula(order):
    weights = torch.randn(order, HEADS, 5, 3, dtype=torch.float64, requires_grad=True)
    core = torch.randn(HEADS, *[3] * order, dtype=torch.float64, requires_grad=True)
    probes = torch.randn(order, HEADS, 5, 3, dtype=torch.float64), torch.randn(order, HEADS, 3, 3).double()
    found = []
    for by_form in (True, False):
        if by_form:
            factors, unfolded = joint_factors(weights, core)
            core_grams = unfolded @ unfolded.mT
        else:
            factors = torch.stack(multilinear_factors(weights.unbind(), core))
            core_grams = torch.stack([mode_gram(core, n, order) for n in range(order)])
        alone = torch.autograd.grad((factors * probes[0]).sum(), (weights, core), retain_graph=True)
        loss = (factors * probes[0]).sum() + (core_grams * probes[1]).sum()
        found.append([factors, core_grams, *alone, *torch.autograd.grad(loss, (weights, core))])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    few = weights[:, :1, :2, :2], core[:1, *[slice(2)] * order]
    torch.autograd.gradgradcheck(joint_factors, [each.detach().requires_grad_() for each in few])
