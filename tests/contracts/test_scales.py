"""Layers that divide by a norm do not know the scale of their input, however small or large it is."""

from __future__ import annotations

import pytest
import torch

import kernel_attention as ka
from kernel_attention.analysis.layer_measures import mode_singular_values, numerical_rank
from kernel_attention.tensors.features.kernel_functions import get_kernel_function
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures
from kernel_attention.tensors.multilinear.unfoldings import leading_eigenvectors, pseudo_inverse

LAYERS = {
    "cosine": ("cosine", {}),
    "primal, data-independent": ("primal", {"rank": 3, "data_dependent": False, "impl": "reference"}),
    "primal, data-independent, fused": ("primal", {"rank": 3, "data_dependent": False, "impl": "fused"}),
    "primal": ("primal", {"rank": 3, "rank_multiplier": 2, "impl": "reference"}),
    "primal, fused": ("primal", {"rank": 3, "rank_multiplier": 2, "impl": "fused"}),
    "multilinear": ("multilinear", {"rank": 3, "impl": "reference"}),
    "multilinear, fused": ("multilinear", {"rank": 3, "impl": "fused"}),
    "multilinear, data-dependent": (
        "multilinear",
        {"rank": 3, "variant": "data_dependent", "impl": "reference"},
    ),
    "multilinear, data-dependent, fused": (
        "multilinear", {"rank": 3, "variant": "data_dependent", "impl": "fused"}
    ),
}  # fmt: skip
# The outputs follow the values, or the rows that the weights are made of; the others stay.
FOLLOWING = (
    "cosine",
    "primal",
    "primal, fused",
    "multilinear, data-dependent",
    "multilinear, data-dependent, fused",
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-66, -40, 40, 66])
@pytest.mark.parametrize("name", LAYERS)
def test_a_power_of_two_moves_no_digit(name, exponent, dtype):
    """2^66 is 7e19, whose square float32 cannot hold; 2^-66 is 1e-20, whose square it cannot hold either."""
    mechanism, options = LAYERS[name]
    torch.manual_seed(0)
    layer = ka.create_attention(mechanism, 15, 3, bias=False, **options).to(dtype)
    tokens = torch.randn(2, 41, 15, dtype=dtype)
    mask = torch.arange(41)[None] < torch.tensor([41, 30])[:, None]
    probe, results = torch.randn(2, 41, 15, dtype=dtype), []
    for scale in (1.0, 2.0**exponent):
        x = (scale * tokens).requires_grad_()
        y = layer(x, attention_mask=mask)
        (slope,) = torch.autograd.grad((y * probe)[mask].sum(), x)
        power = 1.0 if name in FOLLOWING else 0.0
        results.append((y[mask] * scale**-power, slope[mask] * scale ** (1 - power)))
    precision = torch.finfo(dtype).eps
    for found, wanted in zip(results[1], results[0], strict=True):
        assert (found - wanted).norm() < 8 * precision * wanted.norm()
        assert wanted.norm() > 0


def matrices(dtype: torch.dtype) -> torch.Tensor:
    """Gram matrices of full rank, of rank 2, and zero."""
    factors = torch.randn(3, 5, 5, dtype=dtype)
    factors[1, :, 2:] = 0.0
    factors[2] = 0.0
    return factors @ factors.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-90, -66, 66])
def test_eigenvectors_and_inverses_know_no_scale(exponent, dtype):
    gram, scale = matrices(dtype), 2.0**exponent
    torch.testing.assert_close(pseudo_inverse(scale * gram) * scale, pseudo_inverse(gram), rtol=0, atol=0)
    vectors, scaled = leading_eigenvectors(gram, 2), leading_eigenvectors(scale * gram, 2)
    torch.testing.assert_close(scaled, vectors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("exponent", [-66, -40, 40, 66])
def test_the_cosine_kernel_knows_no_scale(exponent, dtype):
    x, z = torch.randn(2, 7, 5, dtype=dtype)
    kernel = get_kernel_function("cosine")
    torch.testing.assert_close(kernel(2.0**exponent * x, 2.0**-exponent * z), kernel(x, z))
    assert not kernel(torch.zeros_like(x), z).any()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_mode_ranks_of_a_tensor_are_those_it_was_made_with(scale):
    """Multilinear rank (2, 3, 3) in float64: a zero does not come out as the root of a rounding error."""
    core = torch.randn(1, 2, 3, 3, dtype=torch.float64)
    factors = [torch.randn(9, rank, dtype=torch.float64) for rank in (2, 3, 3)]
    tensor = scale * torch.einsum("hijk,ai,bj,ck->habc", core, *factors)
    assert [int(numerical_rank(values)) for values in mode_singular_values(tensor)] == [2, 3, 3]


def test_far_keys_are_weighed_by_themselves_and_not_by_padding():
    """Exponents below -1e30, whose largest is still that of a real key."""
    features = SoftmaxPlusFeatures(3, 4)
    q, k = torch.randn(1, 1, 2, 3), 1e16 * torch.randn(1, 1, 4, 3)
    mask = torch.tensor([[True, True, True, False]])
    assert features.normalized_pair(q, k, mask)[1][:, :, :3].amax() == 1.0
