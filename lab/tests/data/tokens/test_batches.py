"""Batches by length: every case in its turn, little padding, an order that depends on (seed, step) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.data.tokens.batches import (
    LengthSampler,
    batch_order,
    length_order,
    make_length_loader,
    make_step_loader,
    padded_batch,
)
from kernel_attention_lab.data.tokens.sets import TokenSplit, fit_length

LENGTHS = np.random.default_rng(0).integers(1, 200, 1003)


@pytest.fixture
def split():
    generator = np.random.default_rng(1)
    sequences = [generator.integers(1, 9, length) for length in generator.integers(1, 30, 53)]
    return TokenSplit.of(sequences, np.arange(53) % 3)


def test_an_epoch_has_every_case_at_most_once_and_leaves_out_less_than_a_batch():
    cases = np.concatenate(batch_order(LENGTHS, 7, 0, 0))
    assert len(set(cases.tolist())) == len(cases) == 1003 - 1003 % 7


def test_batches_hold_cases_of_like_length():
    batches = batch_order(LENGTHS, 8, 0, 0)
    padded = sum(len(batch) * LENGTHS[batch].max() for batch in batches)
    chance = np.random.default_rng(2).permutation(1000).reshape(-1, 8)
    assert padded < 1.1 * sum(LENGTHS[batch].sum() for batch in batches)
    assert sum(8 * LENGTHS[batch].max() for batch in chance) > 1.5 * LENGTHS[:1000].sum(), (
        "as drawn, half is padding"
    )


def test_rounds_go_on_where_the_last_one_ended():
    """13 steps a round through epochs of 10 batches: round by round is step by step."""
    rounds = LengthSampler(LENGTHS[:40], 4, 13, seed=3)
    whole = [batch.tolist() for epoch in range(4) for batch in batch_order(LENGTHS[:40], 4, 3, epoch)]
    for number in (0, 2, 1):
        rounds.set_epoch(number)
        assert list(rounds) == whole[13 * number : 13 * (number + 1)]


def test_the_order_depends_on_seed_and_epoch_only():
    torch.manual_seed(1), np.random.seed(1)
    first = batch_order(LENGTHS, 8, 0, 0)
    torch.manual_seed(2), np.random.seed(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, batch_order(LENGTHS, 8, 0, 0), strict=True))
    for other in (batch_order(LENGTHS, 8, 1, 0), batch_order(LENGTHS, 8, 0, 1)):
        assert not all(np.array_equal(a, b) for a, b in zip(first, other, strict=True))


def test_padding_is_masked_and_nothing_else_is(split):
    for batch in make_step_loader(split, 5, 8, seed=0):
        assert batch.x.shape == batch.attention_mask.shape
        assert batch.attention_mask.any(dim=0).all(), "no column is padding only"
        assert ((batch.x != 0) == batch.attention_mask).all(), "tokens here are not 0"


def test_evaluation_sees_every_case_once_in_the_order_it_says(split):
    batches = list(make_length_loader(split, 6))
    targets = torch.cat([batch.target for batch in batches])
    assert targets.tolist() == split.targets[length_order(split)].tolist()
    rows = [
        row[mask].tolist()
        for batch in batches
        for row, mask in zip(batch.x, batch.attention_mask, strict=True)
    ]
    assert rows == [split.case(case)[0].tolist() for case in length_order(split)]


def test_pairs_have_a_row_each():
    split = TokenSplit.of([np.array([1, 2, 3]), np.array([4]), np.array([5, 6]), np.array([7])], [1, 0])
    batch = padded_batch(split, [1, 0])
    assert batch.x.tolist() == [[[5, 6, 0], [7, 0, 0]], [[1, 2, 3], [4, 0, 0]]]
    assert batch.target.tolist() == [0, 1]
    assert split.lengths.tolist() == [3, 2]


def test_cutting_keeps_the_first_tokens(split):
    cut = fit_length(split, 10, True, "here")
    assert [sequence.tolist() for case in range(53) for sequence in cut.case(case)] == [
        split.case(case)[0][:10].tolist() for case in range(53)
    ]
    with pytest.raises(InputError, match="more than max_len=10"):
        fit_length(split, 10, False, "here")
    assert fit_length(split, 30, False, "here") is split


@pytest.mark.parametrize(("sequences", "message"), [([[]], "case 0 has no tokens"), ([], "has no cases")])
def test_splits_without_tokens_are_refused(sequences, message):
    split = TokenSplit.of([np.array(s, dtype=np.int64) for s in sequences], [0] * len(sequences))
    with pytest.raises(InputError, match=message):
        fit_length(split, 5, True, "here")
