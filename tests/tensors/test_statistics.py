"""Masked statistics equal plain loops over the real tokens."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.tensors.sampling import evenly_spaced, gather_ranks, rows_before, sample_rows
from kernel_attention.tensors.statistics import accumulation_dtype, running_mean, valid_ranks
from reference.primal import spaced

masks = st.integers(1, 13).flatmap(
    lambda length: st.lists(st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=5)
)


def draw(mask: torch.Tensor, width: int = 3) -> torch.Tensor:
    """A sequence batch whose padding holds NaN: whatever reads it shows."""
    x = torch.randn(*mask.shape, width, dtype=torch.float64)
    return x.masked_fill(~mask[..., None], torch.nan)


@given(st.integers(1, 60), st.integers(1, 60))
def test_evenly_spaced_positions_are_distinct_and_reach_both_ends(num_rows, length):
    positions = evenly_spaced(num_rows, length).tolist()
    assert positions == spaced(num_rows, length)
    assert len(set(positions)) == min(num_rows, length)
    assert positions[0] == 0
    assert positions[-1] == (length - 1 if len(positions) > 1 else 0)
    gaps = [after - before for before, after in itertools.pairwise(positions)]
    assert not gaps or max(gaps) - min(gaps) <= 1


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 80))
def test_rows_before_counts_the_evenly_spaced_positions_before(num_rows, length, position):
    assert rows_before(position, num_rows, length) == sum(t < position for t in spaced(num_rows, length))


@given(masks, st.integers(1, 16))
def test_sample_rows_is_the_even_sample_of_each_sequence_alone(mask, num_rows):
    mask = torch.tensor(mask)
    x = draw(mask)
    sampled = sample_rows(x, num_rows, mask)
    assert sampled.shape == (mask.size(0), min(num_rows, mask.size(1)), 3)
    for b in range(mask.size(0)):
        alone = x[b][mask[b]]
        expected = torch.zeros_like(sampled[b])
        for m, position in enumerate(spaced(num_rows, len(alone)) if len(alone) else []):
            expected[m] = alone[position]
        torch.testing.assert_close(sampled[b], expected, rtol=0, atol=0)


@given(st.integers(1, 13), st.integers(1, 16))
def test_sample_rows_without_a_mask_is_that_of_a_full_mask(length, num_rows):
    x = torch.randn(2, length, 3)
    full = torch.ones(2, length, dtype=torch.bool)
    torch.testing.assert_close(sample_rows(x, num_rows), sample_rows(x, num_rows, full), rtol=0, atol=0)


@given(masks)
def test_gather_ranks_reads_the_real_tokens_in_order_and_never_the_padding(mask):
    mask = torch.tensor(mask)
    x = draw(mask)
    ranks = torch.arange(mask.size(1)).expand(mask.size(0), -1)
    gathered = gather_ranks(x, ranks, mask)
    for b in range(mask.size(0)):
        alone = x[b][mask[b]]
        torch.testing.assert_close(gathered[b, : len(alone)], alone, rtol=0, atol=0)
        assert not gathered[b, len(alone) :].any()


def test_the_tokens_of_a_long_sequence_keep_their_order():
    # Sorting algorithms that are not stable happen to keep the order of a few tokens.
    mask = torch.rand(2, 1000) < 0.5
    x = torch.arange(1000.0).expand(2, -1)[..., None]
    gathered = gather_ranks(x, torch.arange(1000).expand(2, -1), mask)[..., 0]
    for b in range(2):
        torch.testing.assert_close(gathered[b, : int(mask[b].sum())], x[b, mask[b], 0], rtol=0, atol=0)


@given(masks)
def test_valid_ranks_count_the_real_tokens_before(mask):
    ranks = valid_ranks(torch.tensor(mask)).tolist()
    for row, rank in zip(mask, ranks, strict=True):
        assert rank == [sum(row[: i + 1]) - 1 for i in range(len(row))]


@given(masks)
def test_running_mean_is_the_mean_of_the_real_prefix(mask):
    mask = torch.tensor(mask)
    x = draw(mask, width=6).unflatten(-1, (2, 3)).transpose(1, 2)
    means = running_mean(x, mask)
    for b in range(mask.size(0)):
        for i in range(mask.size(1)):
            prefix = x[b, :, : i + 1][:, mask[b, : i + 1]]
            expected = prefix.mean(dim=1) if prefix.size(1) else torch.zeros(2, 3, dtype=torch.float64)
            torch.testing.assert_close(means[b, :, i], expected)


def test_running_mean_without_a_mask_is_that_of_a_full_mask():
    x = torch.randn(2, 3, 11, 5)
    torch.testing.assert_close(running_mean(x), running_mean(x, torch.ones(2, 11, dtype=torch.bool)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_mean_accumulates_sixteen_bit_inputs_in_float32(dtype):
    # 4096 equal numbers: a 16-bit running sum stops growing long before the end.
    x = torch.full((1, 1, 4096, 1), 1.5, dtype=dtype)
    assert torch.equal(running_mean(x), x)
    assert accumulation_dtype(dtype) == torch.float32


def test_float64_stays_float64():
    assert accumulation_dtype(torch.float64) == torch.float64
    assert running_mean(torch.randn(1, 1, 3, 2, dtype=torch.float64)).dtype == torch.float64
