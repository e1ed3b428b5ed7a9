"""The baselines on tensors: the chunked causal product, masks, queries that see nothing."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernel_attention import create_attention
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
            softmax_attention(q, k, v, attention_mask=full, is_causal=True),
            softmax_attention(q, k, v, is_causal=True),
        )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("attention", [softmax_attention, cosine_attention])
def test_a_query_that_sees_no_key_gets_zeros_and_finite_gradients(attention, is_causal):
    q, k, v = (random(2, H, 11, P).requires_grad_() for _ in range(3))
    mask = torch.zeros(2, 11, dtype=torch.bool)
    mask[0, 4:] = True
    y = attention(q, k, v, attention_mask=mask, is_causal=is_causal)
    assert not y[1].any()
    assert y[0, :, 0].any() == (not is_causal)
    for gradient in torch.autograd.grad(y.sum(), (q, k, v)):
        assert gradient.isfinite().all()


MASKS = {
    "right": torch.arange(61)[None] < torch.tensor([[61], [40], [1]]),
    "left": torch.arange(61)[None] >= torch.tensor([[0], [21], [60]]),
    "holes": torch.rand(3, 61, generator=torch.Generator().manual_seed(1)) < 0.6,
    "an empty sequence": torch.arange(61)[None] < torch.tensor([[61], [0], [7]]),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_causality_with_padding_equals_the_masked_softmax(mask):
    """Outputs of real tokens and all gradients; what padding holds, however large, reaches neither."""
    leaves = [random(3, H, 61, width).requires_grad_() for width in (P, P, P_V)]
    real = mask[:, None, :, None]
    logits = (leaves[0] @ leaves[1].mT) / P**0.5
    seen = mask[:, None, None, :] & torch.ones(61, 61, dtype=torch.bool).tril() & real
    weights = logits.masked_fill(~seen, -torch.inf).softmax(dim=-1).masked_fill(~seen, 0.0)
    expected = weights @ leaves[2]
    downstream = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * downstream).masked_fill(~real, 0.0).sum(), leaves)
    garbage = [torch.where(real, leaf, 1e200 * torch.randn_like(leaf)) for leaf in leaves]
    for given in (leaves, garbage):
        y = softmax_attention(*given, attention_mask=mask, is_causal=True)
        torch.testing.assert_close(y, expected.masked_fill(~real, 0.0))
        torch.testing.assert_close(torch.autograd.grad((y * downstream).sum(), leaves), gradients)


class LargestTensor(TorchDispatchMode):
    """The number of elements of the largest tensor that any operation makes, in forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        tensors = (leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        self.elements = max(self.elements, *(tensor.untyped_storage().nbytes() // 4 for tensor in tensors), 0)
        return out


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["softmax", "symmetric", "rpc", "scaled", "batch_norm", "conv1d"])
def test_causality_with_padding_makes_no_matrix_over_the_tokens(name, side):
    length = 1024
    layer, x = create_attention(name, 8, 2), torch.randn(2, length, 8, requires_grad=True)
    mask = torch.arange(length)[None] < torch.tensor([[length], [700]])
    with LargestTensor() as largest:
        y = layer(x, attention_mask=mask if side == "right" else mask.flip(1), is_causal=True)
        y[mask].sum().backward()
    assert largest.elements < 64 * length  # an input has B N d = 16 N, the kernel's blocks a little more


def test_causality_with_padding_serves_function_transforms():
    """Gradients of each sequence of a batch, as torch.func takes them: the mask is one of many there."""
    q, k, v = random(3, H, 61, P), random(3, H, 61, P), random(3, H, 61, P_V)
    mask = MASKS["holes"]

    def loss(q, k, v, mask):
        q, k, v, mask = (x[None] for x in (q, k, v, mask))
        return softmax_attention(q, k, v, attention_mask=mask, is_causal=True).square().sum()

    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    softmax_attention(*leaves, attention_mask=mask, is_causal=True).square().sum().backward()
    each = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(q, k, v, mask)
    torch.testing.assert_close(list(each), [leaf.grad for leaf in leaves])


def test_the_scale_replaces_one_over_the_root_of_the_width():
    q, k, v = random(B, H, 11, P), random(B, H, 11, P), random(B, H, 11, P_V)
    torch.testing.assert_close(softmax_attention(q, k, v, scale=0.3), ((q @ k.mT) * 0.3).softmax(-1) @ v)
    torch.testing.assert_close(softmax_attention(q, k, v), ((q @ k.mT) / P**0.5).softmax(-1) @ v)
