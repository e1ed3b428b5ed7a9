"""Linear attention: the order of products, the chunks, the memory, and what vanishing sums do."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.functional import linear_attention
from kernel_attention.mechanisms.linear.functional import causal_product
from kernel_attention.tensors.features.feature_maps import cosine, elu, relu
from kernel_attention.tensors.features.softmax_features import SoftmaxPlusFeatures

BATCH, HEADS, LENGTH, WIDTH, VALUES = 2, 3, 13, 5, 7


def draw(length: int = LENGTH, dtype: torch.dtype = torch.float64):
    q, k = torch.randn(2, BATCH, HEADS, length, WIDTH, dtype=dtype)
    return q, k, torch.randn(BATCH, HEADS, length, VALUES, dtype=dtype)


@pytest.mark.parametrize("chunk_size", [1, 2, 5, 13, 128, None])
def test_chunks_of_any_size_give_the_loop_and_its_gradients(chunk_size):
    q, k, v = (x.requires_grad_() for x in draw())
    chunked = causal_product(q, k, v, chunk_size)
    loop = torch.stack(
        [
            sum((q[:, :, i] * k[:, :, j]).sum(-1, keepdim=True) * v[:, :, j] for j in range(i + 1))
            for i in range(LENGTH)
        ],
        dim=2,
    )
    torch.testing.assert_close(chunked, loop)
    towards = torch.randn_like(loop)
    torch.testing.assert_close(
        torch.autograd.grad(chunked, (q, k, v), towards), torch.autograd.grad(loop, (q, k, v), towards)
    )


@pytest.mark.parametrize("normalize", [True, False])
def test_the_product_taken_from_the_right_is_the_one_taken_from_the_left(normalize):
    q, k, v = draw()
    weights = elu(q) @ elu(k).mT
    for is_causal in (False, True):
        expected = weights.tril() if is_causal else weights
        expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
        torch.testing.assert_close(
            linear_attention(q, k, v, normalize=normalize, is_causal=is_causal), expected @ v
        )


def test_a_mask_leaves_keys_out_wherever_they_are():
    q, k, v = draw()
    mask = torch.tensor([[1, 0, 1, 1, 0, 1, 1, 1, 1, 0, 0, 1, 0]], dtype=torch.bool).expand(BATCH, -1)
    kept = mask[0]
    for is_causal in (False, True):
        y = linear_attention(q, k, v, attention_mask=mask, is_causal=is_causal)[:, :, kept]
        alone = linear_attention(q[:, :, kept], k[:, :, kept], v[:, :, kept], is_causal=is_causal)
        torch.testing.assert_close(y, alone)


def test_a_query_that_sees_nothing_gets_zeros_and_finite_gradients():
    q, k, v = (x.requires_grad_() for x in draw())
    with torch.no_grad():
        q[:, :, 4] = -3.0  # all features zero
        k[:, :, :2] = -2.0
    for is_causal in (False, True):
        y = linear_attention(q, k, v, feature_map=relu, is_causal=is_causal)
        assert not y[:, :, 4].any()
        if is_causal:
            assert not y[:, :, :2].any()
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(y.sum(), (q, k, v)))


def saved_numbers(length: int) -> int:
    """Numbers that autograd keeps for the backward of a causal call."""
    total = 0

    def count(tensor):
        nonlocal total
        total += tensor.numel()
        return tensor

    q, k, v = (x.requires_grad_() for x in draw(length))
    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        linear_attention(q, k, v, is_causal=True)
    return total


def test_causal_memory_is_linear_in_the_length():
    assert saved_numbers(4096) < 2.1 * saved_numbers(2048)


def test_the_causal_state_accumulates_sixteen_bit_inputs_in_float32():
    # 2^17 equal products in 1024 chunks: a bfloat16 running sum stops growing at 256 times its terms.
    ones = torch.ones(1, 1, 2**17, 1, dtype=torch.bfloat16)
    last = causal_product(ones, ones, ones)[0, 0, -1, 0]
    assert abs(last.item() / 2**17 - 1) < 2**-8


def test_softmax_plus_converges_to_softmax_attention():
    q, k, v = (0.7 * x for x in draw())
    for is_causal in (False, True):
        exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        errors = []
        for num_features in (64, 4096, 65536):
            features = SoftmaxPlusFeatures(WIDTH, num_features, seed=1).double()
            y = linear_attention(q, k, v, feature_map=features, is_causal=is_causal)
            errors.append((y - exact).norm() / exact.norm())
        # The expected error falls as 1 / sqrt(m), by 8 and by 4; one draw strays.
        assert errors[1] < errors[0] / 3
        assert errors[2] < min(errors[1] / 1.5, 0.05)


def test_softmax_plus_survives_long_vectors_where_plain_features_underflow():
    # Lengths of trained networks' queries and keys: exp(-||x||^2 / 2 sqrt(p)) is zero in float32 there.
    features = SoftmaxPlusFeatures(WIDTH, 4096)
    q, k, v = draw(dtype=torch.float32)
    q, k = (40 * torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    assert not features(q).any()
    y = linear_attention(q, k, v, feature_map=features)
    assert y.isfinite().all()
    assert y.abs().amax(dim=(0, 1, 3)).min() > 0


def test_signed_kernels_are_summed_not_averaged():
    q, k, v = draw()
    y = linear_attention(q, k, v, feature_map=cosine, normalize=False)
    torch.testing.assert_close(y, cosine(q) @ cosine(k).mT @ v)
