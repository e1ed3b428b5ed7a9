"""Explicit features of the softmax kernel: unbiased, seeded, redrawn, and exact in the limit."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_attention import InputError
from kernel_attention.tensors.features.feature_maps import get_feature_map, is_positive
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures, TaylorFeatures

WIDTH = 5


def draw(scale: float = 0.7) -> tuple[torch.Tensor, torch.Tensor]:
    return (scale * torch.randn(2, 1, 1, 7, WIDTH, dtype=torch.float64)).unbind()


def kernel(q, k):
    return (q @ k.mT / math.sqrt(WIDTH)).exp()


@pytest.mark.parametrize("orthogonal", [True, False])
def test_random_features_estimate_the_softmax_kernel_without_bias(orthogonal):
    q, k = draw()
    estimates = torch.stack([
        (f := SoftmaxPlusFeatures(WIDTH, 256, seed=seed, orthogonal=orthogonal).double())(q) @ f(k).mT
        for seed in range(300)
    ])  # fmt: skip
    error = (estimates.mean(0) - kernel(q, k)) / (estimates.std(0) / math.sqrt(300))
    assert error.abs().max() < 4.5  # standard errors, 49 pairs
    assert (estimates > 0).all()


def test_orthogonal_features_vary_less_than_independent_ones():
    q, k = draw()
    spread = {}
    for orthogonal in (True, False):
        estimates = torch.stack([
            (f := SoftmaxPlusFeatures(WIDTH, WIDTH, seed=seed, orthogonal=orthogonal).double())(q) @ f(k).mT
            for seed in range(500)
        ])  # fmt: skip
        spread[orthogonal] = ((estimates - kernel(q, k)) / kernel(q, k)).square().mean()
    assert spread[True] < spread[False]


def test_directions_are_orthogonal_within_blocks():
    projection = SoftmaxPlusFeatures(WIDTH, 2 * WIDTH + 1).projection.double()
    gram = projection[:WIDTH] @ projection[:WIDTH].mT
    torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-5)


def test_a_seed_is_a_set_of_features_and_redrawing_is_another():
    features = SoftmaxPlusFeatures(WIDTH, 7, seed=3)
    first = features.projection.clone()
    state = torch.random.get_rng_state()
    assert torch.equal(SoftmaxPlusFeatures(WIDTH, 7, seed=3).projection, first)
    assert torch.equal(torch.random.get_rng_state(), state)  # the global generator is left alone
    features.redraw()
    assert not torch.equal(features.projection, first)
    assert torch.equal(features.projection, SoftmaxPlusFeatures(WIDTH, 7, seed=4).projection)
    features.redraw(3)
    assert torch.equal(features.projection, first)
    assert "projection" in features.state_dict()
    assert not list(features.parameters())


def test_the_default_has_as_many_features_as_channels():
    assert SoftmaxPlusFeatures(WIDTH)(draw()[0]).shape == (1, 1, 7, WIDTH)


def test_sixteen_bit_inputs_are_exponentiated_in_float32():
    features = SoftmaxPlusFeatures(64)
    x = torch.randn(1, 1, 7, 64).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = features(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), features(x.float()), rtol=2.0**-8, atol=0)


def test_truncated_taylor_features_converge_to_the_softmax_kernel():
    q, k = draw()
    largest = (q @ k.mT).abs().max() / math.sqrt(WIDTH)
    for order in range(9):
        features = TaylorFeatures(WIDTH, order).double()
        error = (features(q) @ features(k).mT - kernel(q, k)).abs().max()
        # Lagrange's remainder.
        assert error <= largest ** (order + 1) / math.factorial(order + 1) * largest.exp()
    assert error < 1e-3


@pytest.mark.parametrize("order", [0, 1, 2, 3, 4])
def test_taylor_features_are_the_truncated_series(order):
    q, k = draw()
    features = TaylorFeatures(WIDTH, order)
    x = q @ k.mT / math.sqrt(WIDTH)
    torch.testing.assert_close(
        features(q) @ features(k).mT, sum(x**t / math.factorial(t) for t in range(order + 1))
    )
    assert features(q).size(-1) == features.num_features == math.comb(WIDTH + order, order)


def test_the_features_of_a_degree_are_those_of_equation_12():
    x = torch.tensor([[[[2.0, 3.0]]]], dtype=torch.float64) * 2**0.25  # the factor that the map divides out
    expected = [1, 2, 3, 4 / math.sqrt(2), 6, 9 / math.sqrt(2)]
    torch.testing.assert_close(TaylorFeatures(2, 2)(x).flatten(), torch.tensor(expected, dtype=torch.float64))


def test_which_kernels_are_never_negative():
    for name in ("elu", "relu", "softmax_plus", "taylor"):
        assert is_positive(get_feature_map(name, WIDTH))
    for spec in ("cosine", "frobenius", "identity", {"taylor": {"order": 3}}):
        assert not is_positive(get_feature_map(spec, WIDTH))
    q, k = draw(3.0)
    assert (TaylorFeatures(WIDTH, 2)(q) @ TaylorFeatures(WIDTH, 2)(k).mT > 0).all()


def test_maps_with_options_are_made_from_their_spec():
    features = get_feature_map({"softmax_plus": {"num_features": 9, "seed": 2}}, WIDTH)
    assert (features.num_features, features.seed) == (9, 2)
    for spec, message in {
        "softmax_plus": "has a state, which this mechanism cannot keep",
        "softmaxplus": "unknown feature_map 'softmaxplus'; did you mean 'softmax_plus'",
    }.items():
        with pytest.raises(InputError, match=message):
            get_feature_map(spec)
    for spec, message in (
        ({"softmax_plus": {"number": 3}}, "unknown option of feature_map 'softmax_plus' 'number'"),
        ({"softmax_plus": {"num_features": 0}}, "num_features=0 must be a whole number of at least 1"),
        ({"taylor": {"order": -1}}, "order=-1 must be a whole number of at least 0"),
        ({"elu": {"alpha": 1}}, "unknown option of feature_map 'elu' 'alpha' .accepted: none."),
        ({"elu": None, "relu": None}, "must be a name, "),
        (3, "feature_map=3 must be a name, "),
    ):
        with pytest.raises(InputError, match=message):
            get_feature_map(spec, WIDTH)
