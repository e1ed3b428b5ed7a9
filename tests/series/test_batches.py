"""Padding, the mask, and an order that depends on (seed, epoch) alone."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernel_attention.errors import InputError
from kernel_attention.series import SequenceSplit, make_loader
from kernel_attention.training.samplers import EpochSampler

LENGTHS = (5, 2, 7, 3, 1)
CHANNELS = 3


@pytest.fixture
def split():
    generator = np.random.default_rng(0)
    sequences = [generator.normal(size=(n, CHANNELS)).astype(np.float32) for n in LENGTHS]
    return SequenceSplit(sequences, np.arange(len(LENGTHS)))


def order(loader, epoch):
    loader.sampler.set_epoch(epoch)
    return torch.cat([batch.target for batch in loader]).tolist()


def test_a_batch_is_padded_right_with_zeros_to_its_own_longest(split):
    batches = list(make_loader(split, batch_size=2))
    assert [tuple(batch.x.shape) for batch in batches] == [(2, 5, 3), (2, 7, 3), (1, 1, 3)]
    cases = [(x, mask) for batch in batches for x, mask in zip(batch.x, batch.attention_mask, strict=True)]
    for (x, mask), sequence in zip(cases, split.sequences, strict=True):
        np.testing.assert_array_equal(x[: len(sequence)], sequence)
        assert (x[len(sequence) :] == 0).all()
        assert mask.tolist() == [True] * len(sequence) + [False] * (len(x) - len(sequence))


def test_sequences_without_targets_give_batches_without(split):
    assert [batch.target for batch in make_loader(split.sequences, batch_size=3)] == [None, None]


def test_drop_last_leaves_out_the_incomplete_batch(split):
    assert [len(batch.x) for batch in make_loader(split, batch_size=2, drop_last=True)] == [2, 2]


def test_a_shuffled_pass_sees_every_case_once_and_a_new_loader_repeats_it(split):
    first = order(make_loader(split, 2, shuffle=True, seed=3), epoch=4)
    assert sorted(first) == [0, 1, 2, 3, 4]
    assert order(make_loader(split, 2, shuffle=True, seed=3), epoch=4) == first


def test_workers_change_nothing(split):
    split = SequenceSplit(split.sequences, split.targets, np.linspace(0.5, 1.5, 5, dtype=np.float32))
    alone = make_loader(split, 2, shuffle=True, seed=1)
    helped = make_loader(split, 2, shuffle=True, seed=1, num_workers=1)
    for one, other in zip(alone, helped, strict=True):
        for a, b in zip(one, other, strict=True):
            assert torch.equal(a, b)


def test_weights_stay_with_their_cases(split):
    weights = np.arange(1, 6, dtype=np.float32)
    plain = order(make_loader(split, 2, shuffle=True, seed=3), epoch=0)
    weighted = make_loader(SequenceSplit(split.sequences, split.targets, weights), 2, shuffle=True, seed=3)
    assert torch.cat([batch.weight for batch in weighted]).tolist() == [case + 1 for case in plain]
    assert next(iter(make_loader(split, 2))).weight is None


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_global_generators_are_neither_read_nor_moved(split, shuffle):
    def passes(state):
        torch.manual_seed(state)
        np.random.seed(state)
        before = torch.get_rng_state(), np.random.get_state()[1].copy()
        targets = [
            batch.target.tolist() for _ in range(2) for batch in make_loader(split, 2, shuffle=shuffle)
        ]
        assert torch.equal(torch.get_rng_state(), before[0])
        assert (np.random.get_state()[1] == before[1]).all()
        return targets

    assert passes(1) == passes(2)


def test_read_only_arrays_are_accepted(split):
    for array in (*split.sequences, split.targets):
        array.flags.writeable = False
    assert len(list(make_loader(split, batch_size=5))) == 1


@given(length=st.integers(1, 60), seed=st.integers(0, 2**40), epoch=st.integers(0, 10_000))
def test_the_sampler_is_a_permutation_that_seed_and_epoch_determine(length, seed, epoch):
    samplers = [EpochSampler(length, seed) for _ in range(2)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    first, second = map(list, samplers)
    assert first == second == list(samplers[0])
    assert sorted(first) == list(range(length))
    assert len(samplers[0]) == length


def test_epochs_and_seeds_have_orders_of_their_own():
    orders = set()
    for seed in range(6):
        sampler = EpochSampler(50, seed)
        for epoch in range(6):
            sampler.set_epoch(epoch)
            orders.add(tuple(sampler))
    assert len(orders) == 36


@pytest.mark.parametrize(
    ("call", "what"),
    [
        (lambda s: make_loader(s, 0), "batch_size 0"),
        (lambda s: make_loader(s, 2.5), "batch_size 2.5"),
        (lambda s: make_loader([], 2), "split is empty"),
        (
            lambda s: make_loader(s, 9, drop_last=True),
            "drop_last with batch_size 9 leaves no batch of 5 cases",
        ),
        (lambda s: make_loader(s, 2, num_workers=-1), "num_workers -1"),
        (lambda s: make_loader(s, 2, shuffle=True, seed=-1), "seed -1"),
        (lambda s: EpochSampler(0, 1), "length 0"),
        (lambda s: EpochSampler(3, 1.5), "seed 1.5"),
    ],
)
def test_bad_arguments_are_named(call, what, split):
    with pytest.raises(InputError, match=what):
        call(split)
