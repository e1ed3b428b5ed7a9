"""Feature maps: norms, dead rows, precision, names."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import InputError
from kernel_attention.tensors.features.feature_maps import FEATURE_MAPS, cosine, get_feature_map, identity

X = torch.randn(2, 3, 7, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def test_cosine_rows_have_norm_one_and_their_inner_products_are_cosines():
    features = cosine(X)
    expected = torch.nn.functional.cosine_similarity(X[:, :, :, None], X[:, :, None], dim=-1)
    torch.testing.assert_close(features @ features.mT, expected)


def test_a_zero_row_maps_to_zero_and_passes_no_gradient():
    # x / max(||x||, eps) has the slope 1 / eps there: a gradient twelve orders of magnitude too large.
    x = X.clone()
    x[:, :, 2] = 0.0
    x.requires_grad_()
    features = cosine(x)
    assert not features[:, :, 2].any()
    features.sum().backward()
    assert not x.grad[:, :, 2].any()
    assert x.grad.isfinite().all()


def test_cosine_gradients_are_right_away_from_zero():
    assert torch.autograd.gradcheck(cosine, X.clone().requires_grad_(), fast_mode=True)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e4])
def test_cosine_does_not_depend_on_the_scale_of_its_input(scale):
    torch.testing.assert_close(cosine(X.float() * scale), cosine(X).float())


def test_the_norm_of_float16_rows_does_not_overflow():
    x = torch.full((1, 1, 1, 64), 6e4, dtype=torch.float16)
    torch.testing.assert_close(cosine(x), torch.full_like(x, 0.125))


def test_identity_is_the_linear_kernel():
    assert identity(X) is X


@pytest.mark.parametrize("name", sorted(FEATURE_MAPS))
def test_maps_are_found_by_name(name):
    assert get_feature_map(name) is FEATURE_MAPS[name]
    assert get_feature_map(FEATURE_MAPS[name]) is FEATURE_MAPS[name]


def test_an_unknown_name_offers_the_nearest():
    with pytest.raises(InputError, match=r"unknown feature_map 'cosin'; did you mean 'cosine'\?"):
        get_feature_map("cosin")


def test_hedgehog_has_two_distributions_that_a_sign_exchanges():
    x = 50 * torch.randn(2, 3, 7, 5)
    first, second = get_feature_map("hedgehog")(x, None, False).chunk(2, dim=-1)
    torch.testing.assert_close(first.sum(-1), torch.ones(2, 3, 7))
    torch.testing.assert_close(
        get_feature_map("hedgehog")(-x, None, False), torch.cat([second, first], dim=-1)
    )
