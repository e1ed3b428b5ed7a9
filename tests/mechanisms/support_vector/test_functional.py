"""The identities of Attention-BN and Attention-SH, on the functions."""

from __future__ import annotations

import math

import pytest
import torch

from kernel_attention.functional import (
    batch_norm_attention,
    recentre,
    scaled_heads_attention,
    softmax_attention,
    support_vector_attention,
)
from kernel_attention.mechanisms.support_vector.functional import _prefix_moments
from kernel_attention.tensors.blocks import block_causal_attention
from kernel_attention.tensors.pooling import running_pool

BATCH, HEADS, LENGTH, WIDTH = 2, 3, 11, 5
FORMS = [(0.6, False), (1.0, False), (0.6, True), (1.0, True)]
forms = pytest.mark.parametrize(("beta", "normalize"), FORMS)


def draw(dtype: torch.dtype = torch.float64, length: int = LENGTH):
    return torch.randn(3, BATCH, HEADS, length, WIDTH, dtype=dtype).unbind()


def as_printed(q, k, v, beta, normalize, eps=1e-5):
    """Eq. 26, or eq. 22 with the weight beta: both sides shifted and scaled."""
    mean = k.mean(dim=2, keepdim=True)
    scale = (k.var(dim=2, keepdim=True, unbiased=False) + eps).rsqrt() if normalize else 1.0
    q, k = (q - beta * mean) * scale, (k - beta * mean) * scale
    return (q @ k.mT / math.sqrt(WIDTH)).softmax(-1) @ v


def test_beta_0_is_softmax_attention():
    q, k, v = draw()
    torch.testing.assert_close(
        batch_norm_attention(q, k, v, beta=0.0), softmax_attention(q, k, v), rtol=1e-13, atol=1e-13
    )
    assert recentre(q, k, beta=0.0)[1] is k


@forms
def test_the_query_side_is_the_two_sided_form(beta, normalize):
    q, k, v = draw()
    torch.testing.assert_close(
        batch_norm_attention(q, k, v, beta=beta, normalize=normalize), as_printed(q, k, v, beta, normalize)
    )


def test_equation_24_only_the_keys_mean_against_the_keys_remains():
    q, k, v = draw()
    logits = (q @ k.mT - k.mean(dim=2, keepdim=True) @ k.mT) / math.sqrt(WIDTH)
    torch.testing.assert_close(batch_norm_attention(q, k, v), logits.softmax(-1) @ v)


@forms
@pytest.mark.parametrize("factor", [1, 2, 3])
def test_causal_forms_are_the_non_causal_form_on_each_prefix(beta, normalize, factor):
    q, k, v = draw()
    options = {"factors": (factor,) * HEADS, "beta": beta, "normalize": normalize}
    y = scaled_heads_attention(q, k, v, **options, is_causal=True)
    for now in range(1, LENGTH + 1):
        prefix = scaled_heads_attention(q[:, :, :now], k[:, :, :now], v[:, :, :now], **options)
        torch.testing.assert_close(y[:, :, now - 1], prefix[:, :, -1])


def test_factor_1_is_softmax_attention():
    q, k, v = draw()
    for is_causal in (False, True):
        y = scaled_heads_attention(q, k, v, (1, 1, 1), is_causal=is_causal)
        softmax = softmax_attention(q, k, v, is_causal=is_causal)
        torch.testing.assert_close(y, softmax, rtol=1e-13, atol=1e-13)


def test_a_factor_beyond_the_length_leaves_one_key():
    q, k, v = draw()
    y = scaled_heads_attention(q, k, v, (100,) * HEADS)
    torch.testing.assert_close(y, v.mean(dim=2, keepdim=True).expand_as(y))
    y = scaled_heads_attention(q, k, v, (100,) * HEADS, is_causal=True)
    torch.testing.assert_close(y, v.cumsum(dim=2) / torch.arange(1, LENGTH + 1)[:, None])


def test_pooling_commutes_with_the_projections():
    x, weight = torch.randn(BATCH, LENGTH, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)
    from kernel_attention.tensors.pooling import pool

    torch.testing.assert_close(pool(x, 3) @ weight.mT, pool(x @ weight.mT, 3))


def test_prefix_moments_are_those_of_the_prefixs_keys():
    k = torch.randn(BATCH, HEADS, LENGTH, WIDTH, dtype=torch.float64)
    for factor in (1, 2, 4):
        pooled = running_pool(k, factor)
        mean, variance = _prefix_moments(pooled, factor)
        for i in range(LENGTH):
            ends = [*range(factor - 1, i - i % factor, factor), i]  # completed blocks and the open one
            keys = pooled[:, :, ends]
            torch.testing.assert_close(mean[:, :, i], keys.mean(dim=2))
            torch.testing.assert_close(variance[:, :, i], keys.var(dim=2, unbiased=False))


def test_prefix_variance_is_stable_where_the_difference_of_squares_is_not():
    # Channels of mean 300 and standard deviation 0.01: E[k^2] - E[k]^2 has no correct digit in float32.
    k = 300.0 + 0.01 * torch.randn(1, 1, 2000, WIDTH, dtype=torch.float64)
    single = k.float()
    _, variance = _prefix_moments(single - single[:, :, :1], 1)
    exact = single.double().var(dim=2, unbiased=False)
    torch.testing.assert_close(variance[:, :, -1].double(), exact, rtol=1e-4, atol=0)
    naive = single.square().mean(dim=2) - single.mean(dim=2).square()
    assert ((naive.double() - exact).abs() > exact).any()


@pytest.mark.parametrize("is_causal", [False, True])
def test_normalised_attention_is_right_in_float32_on_near_constant_channels(is_causal):
    q, k, v = draw()
    k = 300.0 + 0.02 * k
    q = 300.0 + 0.02 * q
    q, k = q.float().double(), k.float().double()
    exact = batch_norm_attention(q, k, v, normalize=True, is_causal=is_causal)
    y = batch_norm_attention(q.float(), k.float(), v.float(), normalize=True, is_causal=is_causal)
    assert (y - exact).norm() < 1e-2 * exact.norm()


def naive_block_causal(q, k, v, factor):
    """Row i of k and v is the open block at token i."""
    rows = []
    for i in range(q.size(2)):
        seen = [*range(factor - 1, i - i % factor, factor), i]
        logits = (q[:, :, i, None] @ k[:, :, seen].mT) / math.sqrt(q.size(3))
        rows.append(logits.softmax(-1) @ v[:, :, seen])
    return torch.cat(rows, dim=2)


@pytest.mark.parametrize("factor", [2, 3, 4, 11, 12])
def test_one_fused_call_serves_completed_and_open_blocks_and_their_gradients(factor):
    q, k, v = (x.requires_grad_() for x in draw())
    y, expected = block_causal_attention(q, k, v, factor=factor), naive_block_causal(q, k, v, factor)
    torch.testing.assert_close(y, expected)
    towards = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, (q, k, v), towards), torch.autograd.grad(expected, (q, k, v), towards)
    )


def test_the_open_blocks_logit_keeps_its_digits_in_bfloat16():
    # Logits near 40 differ by less than bfloat16's spacing of 0.25 there.
    q, k, v = draw(torch.float32, length=64)
    q, k = q.bfloat16(), (k + 8 * torch.nn.functional.normalize(q, dim=-1)).bfloat16()
    y = block_causal_attention(q, k, v.bfloat16(), factor=4)
    exact = naive_block_causal(q.double(), k.double(), v.bfloat16().double(), 4)
    assert (y.double() - exact).norm() < 2.0**-7 * exact.norm()


def test_the_shortcut_does_not_hold_for_a_linear_kernel():
    q, k, v = draw()
    from kernel_attention.functional import linear_attention

    def linear(q, k, v, factor, **options):
        return linear_attention(q, k, v, **options)

    right = support_vector_attention(q, k, v, attention=linear, shift_invariant=False, beta=0.6)
    wrong = support_vector_attention(q, k, v, attention=linear, shift_invariant=True, beta=0.6)
    assert not torch.allclose(right, wrong)
    with pytest.raises(ValueError, match="needs a shift-invariant kernel"):
        support_vector_attention(q, k, v, attention=linear, shift_invariant=False, beta=0.6, is_causal=True)


@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_narrowest_heads_are_pooled_in_16_bits(dtype, is_causal, width):
    q, k, v = (x[..., :width].to(dtype).requires_grad_() for x in draw())
    out = scaled_heads_attention(q, k, v, [1, 2, 3], is_causal=is_causal)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = scaled_heads_attention(*exact, [1, 2, 3], is_causal=is_causal)
    probe = torch.randn_like(expected)
    (out.double() * probe).sum().backward()
    (expected * probe).sum().backward()
    # Pooled keys and values, logits, weights and their products: a handful of roundings.
    bound = 8 * torch.finfo(dtype).eps
    assert (out.double() - expected).norm() < bound * expected.norm()
    for found, wanted in zip((q, k, v), exact, strict=True):
        assert (found.grad.double() - wanted.grad).norm() < bound * wanted.grad.norm()
