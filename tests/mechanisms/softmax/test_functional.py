"""The baselines on tensors: the chunked causal product, masks, queries that see nothing."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.functional import cosine_attention, softmax_attention
from kernel_attention.mechanisms.linear.functional import causal_product

B, H, P, P_V = 2, 3, 5, 7


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def quadratic(phi_q: torch.Tensor, phi_k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    rows = []
    for i in range(phi_q.size(2)):
        terms = [(phi_q[:, :, i] * phi_k[:, :, j]).sum(-1, keepdim=True) * v[:, :, j] for j in range(i + 1)]
        rows.append(sum(terms))
    return torch.stack(rows, dim=2)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 4, 11, 12, 128])
@pytest.mark.parametrize("length", [1, 2, 11, 12, 13])
def test_the_chunked_causal_product_equals_the_double_loop(length, chunk_size):
    leaves = [random(B, H, length, P), random(B, H, length, P), random(B, H, length, P_V)]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    chunked, looped = causal_product(*leaves, chunk_size=chunk_size), quadratic(*leaves)
    torch.testing.assert_close(chunked, looped)
    downstream = torch.randn_like(looped)
    torch.testing.assert_close(
        torch.autograd.grad((chunked * downstream).sum(), leaves),
        torch.autograd.grad((looped * downstream).sum(), leaves),
    )


def test_chunks_do_not_see_the_future():
    phi_q, phi_k, v = random(B, H, 17, P), random(B, H, 17, P), random(B, H, 17, P_V)
    before = causal_product(phi_q, phi_k, v, chunk_size=4)
    for now in range(1, 17):
        k, w = phi_k.clone(), v.clone()
        k[:, :, now:], w[:, :, now:] = 1e4, -1e4
        assert torch.equal(causal_product(phi_q, k, w, chunk_size=4)[:, :, :now], before[:, :, :now])


def test_cosine_attention_of_a_long_sequence_crosses_its_own_chunks():
    q, k, v = random(1, 1, 300, P), random(1, 1, 300, P), random(1, 1, 300, P_V)
    weights = torch.nn.functional.cosine_similarity(q[:, :, :, None], k[:, :, None], dim=-1)
    torch.testing.assert_close(cosine_attention(q, k, v, is_causal=True), weights.tril() @ v)
    torch.testing.assert_close(cosine_attention(q, k, v), weights @ v)


def test_causality_with_a_full_mask_is_causality_without_one():
    for queries, keys in ((11, 11), (5, 11), (11, 5)):
        q, k, v = random(B, H, queries, P), random(B, H, keys, P), random(B, H, keys, P_V)
        full = torch.ones(B, keys, dtype=torch.bool)
        torch.testing.assert_close(
            softmax_attention(q, k, v, key_padding_mask=full, is_causal=True),
            softmax_attention(q, k, v, is_causal=True),
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attention", [softmax_attention, cosine_attention])
def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients(attention, is_causal):
    q, k, v = (random(2, H, 11, P).requires_grad_() for _ in range(3))
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 4:] = True
    y = attention(q, k, v, key_padding_mask=mask, is_causal=is_causal)
    assert not y[1].any()
    assert y[0, :, 0].any() == (not is_causal)
    for gradient in torch.autograd.grad(y.sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_the_scale_replaces_one_over_the_root_of_the_width():
    q, k, v = random(B, H, 11, P), random(B, H, 11, P), random(B, H, 11, P_V)
    torch.testing.assert_close(softmax_attention(q, k, v, scale=0.3), ((q @ k.mT) * 0.3).softmax(-1) @ v)
    torch.testing.assert_close(softmax_attention(q, k, v), ((q @ k.mT) / P**0.5).softmax(-1) @ v)
