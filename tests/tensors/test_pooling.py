"""Pooling, compaction and convolution equal plain loops over the real tokens."""

from __future__ import annotations

import pytest
import torch

from kernel_attention import create_attention
from kernel_attention.tensors.convolution import convolve_grid, convolve_sequence
from kernel_attention.tensors.padding import compaction, in_blocks
from kernel_attention.tensors.pooling import pool, pool_mask, running_pool

BATCH, LENGTH, WIDTH = 3, 11, 5
MODES = pytest.mark.parametrize("mode", ["average", "max", "conv"])
FACTORS = pytest.mark.parametrize("factor", [1, 2, 3, 4, 11, 12, 40])


def by_hand(tokens, factor, mode, weight):
    """(n, d) -> (ceil(n / factor), d)."""
    blocks = []
    for start in range(0, len(tokens), factor):
        members = tokens[start : start + factor]
        if mode == "average" or factor == 1:
            blocks.append(members.mean(0))
        elif mode == "max":
            blocks.append(members.amax(0))
        else:
            blocks.append((weight[:, : len(members)].mT * members).sum(0) * factor / len(members))
    return torch.stack(blocks)


@MODES
@FACTORS
def test_blocks_are_pooled_over_the_tokens_they_have(mode, factor):
    x, weight = (
        torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, factor, dtype=torch.float64),
    )
    torch.testing.assert_close(
        pool(x, factor, mode, weight=weight), torch.stack([by_hand(row, factor, mode, weight) for row in x])
    )
    lengths = (11, 6, 1)
    mask = torch.arange(LENGTH)[None] < torch.tensor(lengths)[:, None]
    garbage = x.masked_fill(~mask[..., None], 1e9)
    pooled, kept = pool(garbage, factor, mode, mask=mask, weight=weight), pool_mask(mask, factor)
    for b, length in enumerate(lengths):
        torch.testing.assert_close(pooled[b][kept[b]], by_hand(x[b, :length], factor, mode, weight))
        if factor > 1:
            assert not pooled[b][~kept[b]].any()


@MODES
@FACTORS
def test_the_running_form_is_the_last_block_of_each_prefix(mode, factor):
    x, weight = (
        torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, factor, dtype=torch.float64),
    )
    running = running_pool(x, factor, mode, weight=weight)
    for now in range(1, LENGTH + 1):
        torch.testing.assert_close(running[:, now - 1], pool(x[:, :now], factor, mode, weight=weight)[:, -1])


def test_an_empty_sequence_pools_to_zeros_with_finite_gradients():
    x = torch.randn(1, 6, WIDTH, requires_grad=True)
    for mode in ("average", "max"):
        y = pool(x, 4, mode, mask=torch.zeros(1, 6, dtype=torch.bool))
        assert not y.any()
        assert torch.autograd.grad(y.sum(), x)[0].isfinite().all()


def test_equal_tokens_pool_to_themselves_in_sixteen_bits():
    x = torch.full((1, 4096, 1), 1.5, dtype=torch.bfloat16)
    assert torch.equal(pool(x, 1000), torch.full((1, 5, 1), 1.5, dtype=torch.bfloat16))
    assert torch.equal(running_pool(x, 1000), x)


def test_blocks_are_filled_up():
    x = torch.arange(5.0)[:, None]
    assert in_blocks(x, 2, -1.0)[..., 0].tolist() == [[0, 1], [2, 3], [4, -1]]
    assert in_blocks(x[:4], 2).data_ptr() == x.data_ptr()  # whole blocks are a view


def test_compaction_moves_real_tokens_together_in_order_and_back():
    mask = torch.tensor(
        [[1, 0, 1, 1, 0], [0, 0, 0, 1, 1], [0, 0, 0, 0, 0], [1, 1, 1, 1, 1]], dtype=torch.bool
    )
    x = torch.randn(4, 5, 3)
    moved = compaction(mask)
    compact = moved.apply(x)
    for b in range(4):
        assert torch.equal(compact[b][moved.attention_mask[b]], x[b][mask[b]])
        assert moved.attention_mask[b].tolist() == sorted(mask[b].tolist(), reverse=True)
    assert torch.equal(moved.undo(compact), x)
    matrix = torch.randn(4, 2, 5, 5)
    rows = moved.undo(matrix[:, 0])
    torch.testing.assert_close(moved.undo_matrix(matrix)[:, 0], moved.undo(rows.mT.contiguous()).mT)


def test_what_is_on_the_right_already_is_not_moved():
    assert compaction(torch.tensor([[True, True, False], [True, False, False]])) is None
    assert compaction(torch.ones(2, 3, dtype=torch.bool)) is None


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 40, 2001])
def test_convolution_along_a_sequence_is_torchs_with_the_extra_padding_in_front(size):
    x, weight = (
        torch.randn(BATCH, LENGTH, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, size, dtype=torch.float64),
    )
    for is_causal, front in ((False, size // 2), (True, size - 1)):
        padded = torch.nn.functional.pad(x.mT, (front, size - 1 - front))
        expected = torch.nn.functional.conv1d(padded, weight[:, None], groups=WIDTH).mT
        torch.testing.assert_close(convolve_sequence(x, weight, is_causal=is_causal), expected)
    shared = convolve_sequence(x, weight[0])
    torch.testing.assert_close(shared, convolve_sequence(x, weight[:1].expand(WIDTH, -1)))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*:DeprecationWarning")
def test_a_traced_convolution_serves_other_lengths():
    short, long, weight = torch.randn(1, 20, 3), torch.randn(2, 131, 3), torch.randn(5)
    traced = torch.jit.trace(convolve_sequence, (short, weight))
    torch.testing.assert_close(traced(long, weight), convolve_sequence(long, weight))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("size", [1, 2, 5, 40])
@pytest.mark.parametrize("length", [1, 3, 96, 97, 131, 200])  # one block, and blocks of 16 or 39 tokens
def test_a_shared_kernel_over_blocks_equals_its_shifts(length, size, is_causal):
    x = torch.randn(2, length, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(size, dtype=torch.float64, requires_grad=True)
    of_channels = weight.expand(3, -1)  # a kernel per channel is a sum of shifts
    slope = torch.randn_like(x)
    blocks, shifts = (convolve_sequence(x, w, is_causal=is_causal) for w in (weight, of_channels))
    torch.testing.assert_close(blocks, shifts, rtol=1e-12, atol=1e-12)
    wanted = torch.autograd.grad(shifts, (x, weight), slope)
    torch.testing.assert_close(
        torch.autograd.grad(blocks, (x, weight), slope), wanted, rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4, 9, 20])
def test_convolution_over_a_grid_is_torchs_with_the_extra_padding_in_front(size):
    x, weight = (
        torch.randn(BATCH, 3, 4, WIDTH, dtype=torch.float64),
        torch.randn(WIDTH, size, size, dtype=torch.float64),
    )
    front, back = size // 2, size - 1 - size // 2
    padded = torch.nn.functional.pad(x.permute(0, 3, 1, 2), (front, back, front, back))
    expected = torch.nn.functional.conv2d(padded, weight[:, None], groups=WIDTH).permute(0, 2, 3, 1)
    torch.testing.assert_close(convolve_grid(x, weight), expected)
    torch.testing.assert_close(
        convolve_grid(x, weight[0]), convolve_grid(x, weight[:1].expand(WIDTH, -1, -1))
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("scaled_heads", {}),
        ("scaled_heads", {"kernel": "sparse"}),
        ("scaled_heads", {"kernel": "linear"}),
        ("scaled_heads", {"pooling": "max"}),
        ("batch_norm_scaled_heads", {"normalize": True}),
    ],
)
def test_blocks_far_beyond_the_sequence_are_the_sequence(name, options, is_causal):
    x, mask, found = torch.randn(2, 4, 8, dtype=torch.float64), torch.ones(2, 4, dtype=torch.bool), []
    mask[1, 2:] = False
    for factor in (4, 10**7):
        torch.manual_seed(1)
        layer = create_attention(name, embed_dim=8, num_heads=2, factors=factor, **options).double()
        found.append(layer(x, attention_mask=mask, is_causal=is_causal)[mask])
    torch.testing.assert_close(*found)


def test_a_kernel_far_beyond_the_grid_costs_what_the_grid_costs():
    layer = create_attention("conv2d", embed_dim=8, num_heads=2, kernel_size=3000, grid_size=(2, 2))
    assert layer(torch.randn(2, 4, 8)).isfinite().all()
