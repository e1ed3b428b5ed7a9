"""Sparse attention: the patterns are the paper's, and the blocked form is the masked one."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernel_attention import InputError, SupportVectorAttention, limits
from kernel_attention.functional import SparsePattern, sparse_attention, sparse_mask
from kernel_attention.tensors.blocks import softmax_over_blocks
from kernel_attention.tensors.pooling import pool, pool_mask, running_pool
from reference.support_vector import allowed

BATCH, HEADS, WIDTH = 2, 3, 5
PATTERNS = [
    SparsePattern(name, stride, summary)
    for name, stride, summary in [
        ("strided", 1, 1), ("strided", 2, 1), ("strided", 4, 1), ("strided", 6, 1), ("strided", 7, 1),
        ("strided", 12, 1), ("fixed", 1, 1), ("fixed", 4, 1), ("fixed", 4, 2), ("fixed", 6, 5),
        ("fixed", 7, 3), ("fixed", 12, 12),
    ]
]  # fmt: skip


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
def test_the_matrix_is_the_definition_for_tokens_and_for_blocks(pattern):
    for factor, length in itertools.product((1, 2, 3, 5, 8), (1, 2, 7, 29)):
        num_keys = -(-length // factor)
        mask = sparse_mask(pattern, length, num_keys, factor=factor)
        expected = [[allowed(pattern, i, c, factor) for c in range(num_keys)] for i in range(length)]
        assert mask.tolist() == expected


def test_the_patterns_are_those_of_the_paper():
    # Figure 3 of Child et al., l = 4, the last row of the causal matrices.
    strided = sparse_mask(SparsePattern("strided", 4), 16, 16).tril()[15]
    assert strided.nonzero().flatten().tolist() == [3, 7, 11, 12, 13, 14, 15]
    fixed = sparse_mask(SparsePattern("fixed", 4, 1), 16, 16).tril()[14]
    assert fixed.nonzero().flatten().tolist() == [3, 7, 11, 12, 13, 14]


@pytest.mark.parametrize(
    ("pattern", "factor"), [(p, f) for p in PATTERNS for f in (1, 2, 3, 5) if p.stride >= f], ids=str
)
def test_blocked_equals_dense_with_its_gradients(pattern, factor):
    for length, is_causal in itertools.product((1, 5, 24, 29, 35), (False, True)):
        q, k, v = (
            torch.randn(BATCH, HEADS, length, WIDTH, dtype=torch.float64, requires_grad=True)
            for _ in range(3)
        )
        lengths = torch.tensor([length, -(-length // 2)])
        tokens = torch.arange(length) < lengths[:, None]
        pooled = running_pool if is_causal else pool
        results = []
        for impl in ("dense", "blocked"):
            mask = None if is_causal else pool_mask(tokens, factor)
            y = sparse_attention(
                q, pooled(k, factor), pooled(v, factor), pattern, factor=factor, impl=impl,
                is_causal=is_causal, attention_mask=mask,
            )  # fmt: skip
            results.append([y, *torch.autograd.grad(y.sin().sum(), (q, k, v))])
        torch.testing.assert_close(results[1], results[0])


def test_a_pattern_that_sees_everything_is_softmax_attention():
    q, k, v = torch.randn(3, BATCH, HEADS, 7, WIDTH, dtype=torch.float64)
    for is_causal, impl in itertools.product((False, True), ("dense", "blocked")):
        y = sparse_attention(q, k, v, SparsePattern("strided", 7), is_causal=is_causal, impl=impl)
        torch.testing.assert_close(
            y, torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        )


@pytest.mark.parametrize("pattern", [SparsePattern("strided", 10**9), SparsePattern("fixed", 10**9, 3)])
@pytest.mark.parametrize("factor", [1, 2, 5])
@pytest.mark.parametrize("impl", ["auto", "blocked", "dense"])
def test_a_stride_beyond_the_sequence_costs_what_softmax_costs(pattern, factor, impl):
    length, pooled = 700, {False: pool, True: running_pool}
    q, k, v = (torch.randn(1, 2, length, WIDTH, dtype=torch.float64) for _ in range(3))
    real = torch.arange(length)[None] < 650
    for is_causal, padded in itertools.product((False, True), (False, True)):
        mask = pool_mask(real, factor) if padded and not is_causal else None
        keys, values = (pooled[is_causal](x, factor) for x in (k, v))
        call = {"factor": factor, "is_causal": is_causal, "attention_mask": mask}
        y = sparse_attention(q, keys, values, pattern, impl=impl, **call)
        torch.testing.assert_close(y, softmax_over_blocks(q, keys, values, **call), rtol=0, atol=0)


@pytest.mark.parametrize("pattern", [SparsePattern("strided", 300), SparsePattern("strided", 1)])
def test_auto_keeps_to_the_form_with_fewer_logits(pattern):
    """At stride 300 of 1024 the blocked form has as many logits as there are pairs, and three keys a copy."""
    kept = []
    q, k, v = (torch.randn(1, 1, 1024, WIDTH, requires_grad=True) for _ in range(3))
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        sparse_attention(q, k, v, pattern)
    assert max(kept) <= 1024**2


def test_a_mask_beyond_the_limit_is_refused_before_it_is_made(monkeypatch):
    monkeypatch.setenv(limits.VARIABLE, "0.001")
    q = torch.randn(1, 1, 600, WIDTH)
    with pytest.raises(InputError, match=r"stride=500 over 600 queries and 600 keys would take .* GiB"):
        sparse_attention(q, q, q, SparsePattern("strided", 500))
    assert sparse_attention(q, q, q, SparsePattern("strided", 25)).shape == q.shape


@pytest.mark.parametrize("name", ["strided", "fixed"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("stride", "factor"), [(32, 1), (33, 2)])
def test_long_sequences_keep_no_matrix_of_all_pairs(name, is_causal, stride, factor):
    length = 1024
    kept = []
    q, k, v = (torch.randn(1, 1, length, WIDTH, requires_grad=True) for _ in range(3))
    pooled = running_pool if is_causal else pool
    k, v = pooled(k, factor), pooled(v, factor)
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.numel()) or x, lambda x: x):
        sparse_attention(q, k, v, SparsePattern(name, stride), factor=factor, is_causal=is_causal)
    assert max(kept) <= length * (3 * stride + length // stride + 1)


@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=pytest.mark.slow), True])
def test_keys_that_straddle_rows_compile_and_export_without_a_break(is_causal):
    layer = SupportVectorAttention(
        4, 2, kernel={"sparse": {"stride": 25}}, factors=[1, 2], dtype=torch.float64
    )
    x = torch.randn(2, 577, 4, dtype=torch.float64)
    expected = layer(x, is_causal=is_causal)
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, is_causal=is_causal), expected)
    exported = torch.export.export(layer, (x,), {"is_causal": is_causal}).module()
    torch.testing.assert_close(exported(x, is_causal=is_causal), expected)


def test_long_sequences_equal_the_masked_call():
    q, k, v = torch.randn(3, 1, 2, 600, WIDTH, dtype=torch.float64)
    for pattern, is_causal in itertools.product(
        (SparsePattern("strided", 24), SparsePattern("fixed", 24)), (False, True)
    ):
        torch.testing.assert_close(
            sparse_attention(q, k, v, pattern, is_causal=is_causal),
            sparse_attention(q, k, v, pattern, is_causal=is_causal, impl="dense"),
        )


def test_a_query_of_cross_attention_without_a_key_in_its_pattern_gets_zeros():
    q, k, v = torch.randn(1, 1, 9, WIDTH), *torch.randn(2, 1, 1, 3, WIDTH)
    y = sparse_attention(q, k, v, SparsePattern("fixed", 4))
    assert y[:, :, :4].any(dim=-1).all()
    assert not y[:, :, 4:].any()


def test_a_form_that_is_not_defined_is_refused():
    q, k = torch.randn(1, 1, 9, WIDTH), torch.randn(1, 1, 3, WIDTH)
    with pytest.raises(
        InputError, match="impl='blocked' needs self-attention and a stride of at least factor=1"
    ):
        sparse_attention(q, k, k, SparsePattern("fixed", 4), impl="blocked")
    with pytest.raises(InputError, match="at least factor=3, got stride=2"):
        sparse_attention(q, k, k, SparsePattern("fixed", 2), factor=3, impl="blocked")
    with pytest.raises(InputError, match="unknown impl 'flash'"):
        sparse_attention(q, q, q, SparsePattern(), impl="flash")
