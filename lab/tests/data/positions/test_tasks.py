"""Every label of the generated tasks is recomputed from the inputs alone, one case at a time."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention_lab.data.positions import POSITION_TASKS, make_position_task
from kernel_attention_lab.data.positions.task import fixed_positions, training_positions
from kernel_attention_lab.data.texts.text import IGNORED

CASES = 40


def check_mqar(task, x, y):
    pairs, keys, values = {}, [], []
    for place in range(0, 2 * task.items, 2):
        keys.append(x[place])
        values.append(x[place + 1])
        pairs[x[place]] = x[place + 1]
        assert 1 <= x[place] < task.vocabulary // 2 <= x[place + 1] < task.vocabulary
    assert len(set(keys)) == len(set(values)) == task.items
    asked = []
    for place, token in enumerate(x):
        if place < 2 * task.items or token == 0:
            assert y[place] == IGNORED
        else:
            assert (place - 2 * task.items) % 2 == 0
            assert y[place] == pairs[token]
            asked.append(token)
    assert sorted(asked) == sorted(keys), "every key is asked for once"


def check_induction_heads(task, x, y):
    places = [place for place, token in enumerate(x) if token == task.vocabulary]
    assert len(places) == 2
    assert places[1] == task.length - 1
    assert y == [IGNORED] * (task.length - 1) + [x[places[0] + 1]]
    assert max(token for token in x if token != task.vocabulary) < task.vocabulary


def check_copying(task, x, y):
    body, markers = x[: -task.items], x[-task.items :]
    assert markers == [task.vocabulary + 1] * task.items
    tokens = [token for token in body if token != 0]
    assert all(1 <= token <= task.vocabulary for token in tokens)
    assert y == [IGNORED] * len(body) + tokens


def check_long_range_copy(task, x, y):
    check_copying(task, x, y)
    assert 0 not in x[: task.items]


def check_majority(task, x, y):
    ones, zeros = x[:-1].count(1), x[:-1].count(0)
    assert x[-1] == 2
    assert ones + zeros == task.length - 1
    assert y == [IGNORED] * (task.length - 1) + [1 if ones > zeros else 0]


def check_parity(task, x, y):
    flips = False
    for bit in x[:-1]:
        assert bit in (0, 1)
        flips = flips != (bit == 1)
    assert x[-1] == 2
    assert y == [IGNORED] * (task.length - 1) + [int(flips)]


def check_noisy_retrieval(task, x, y):
    stored = []
    for place, row in enumerate(x):
        key, value, flag = row[: task.channels], row[task.channels : -1], row[-1]
        if place < task.items:
            assert (sorted(value), flag) == ([0.0] * (task.values - 1) + [1.0], 0.0)
            stored.append((key, value.index(1.0)))
            assert y[place] == IGNORED
        else:
            assert (set(value), flag) == ({0.0}, 1.0)
            distances = [math.dist(key, other) for other, _ in stored]
            assert y[place] == stored[distances.index(min(distances))][1]
    # A key of 16 entries N(0, 1/16) longer than 3 has a probability below 1e-16.
    long = sum(math.hypot(*key) > 3 for key, _ in stored)
    assert long <= round(task.contamination * task.items)


CHECKS = {
    "mqar": check_mqar,
    "induction_heads": check_induction_heads,
    "selective_copying": check_copying,
    "long_range_copy": check_long_range_copy,
    "majority": check_majority,
    "parity": check_parity,
    "noisy_retrieval": check_noisy_retrieval,
}
SETTINGS = [
    ("mqar", {}),
    ("mqar", {"length": 64, "items": 16, "vocabulary": 34}),
    ("mqar", {"length": 14, "items": 3, "vocabulary": 9, "power": 1.0}),
    ("induction_heads", {"length": 37, "vocabulary": 5}),
    ("induction_heads", {"length": 3}),
    ("selective_copying", {"length": 53, "items": 7, "vocabulary": 4}),
    ("selective_copying", {"length": 10, "items": 5}),
    ("long_range_copy", {"length": 53, "items": 7}),
    ("majority", {"length": 2}),
    ("majority", {"length": 32}),
    ("parity", {"length": 2}),
    ("parity", {"length": 17}),
    ("noisy_retrieval", {}),
    ("noisy_retrieval", {"contamination": 0.4, "items": 11, "length": 24, "values": 3}),
    ("noisy_retrieval", {"contamination": 0.5, "items": 2, "length": 5}),
    ("noisy_retrieval", {"noise": 1.5}),
]


def drawn(name, options, seed=3, cases=CASES):
    task = make_position_task(name, options)
    return task, *task.draw(cases, np.random.default_rng(seed))


def test_every_task_has_a_check():
    assert set(CHECKS) == set(POSITION_TASKS) == {name for name, _ in SETTINGS}


@pytest.mark.parametrize(("name", "options"), SETTINGS, ids=str)
def test_labels(name, options):
    task, inputs, targets = drawn(name, options)
    assert targets.shape == inputs.shape[:2] == (CASES, task.length)
    assert targets.dtype == np.int64
    assert inputs.dtype == (np.float32 if task.is_real else np.int64)
    assert inputs.shape[2:] == ((task.in_features,) if task.is_real else ())
    assert (targets != IGNORED).any(axis=1).all()
    assert targets.max() < task.num_outputs
    if not task.is_real:
        assert 0 <= inputs.min() <= inputs.max() < task.in_features
    for x, y in zip(inputs.tolist(), targets.tolist(), strict=True):
        CHECKS[name](task, x, y)


@pytest.mark.parametrize("power", [0.01, 1.0])
def test_the_gaps_of_associative_recall_follow_the_power_law(power):
    """One pair: the share of every gap, within 5 standard deviations of its binomial count."""
    cases, space = 20_000, 7
    _, _, targets = drawn("mqar", {"items": 1, "length": 2 + 2 * space, "power": power}, cases=cases)
    gaps = ((targets != IGNORED).argmax(axis=1) - 2) // 2
    weights = [(gap + 1) ** (power - 1) for gap in range(space)]
    for gap in range(space):
        share = weights[gap] / sum(weights)
        allowed = 5 * math.sqrt(cases * share * (1 - share))
        assert abs(np.count_nonzero(gaps == gap) - cases * share) < allowed


def test_classes_are_balanced():
    """Fair bits: 5 standard deviations of 10,000 draws are 2.5 %."""
    for name, length in (("majority", 32), ("parity", 32)):
        _, _, targets = drawn(name, {"length": length}, cases=10_000)
        assert abs(targets[:, -1].mean() - 0.5) < 0.025


def test_contamination_changes_keys_alone():
    """Test sets that differ in contamination ask the same queries, with the same answers."""
    clean, inputs, targets = drawn("noisy_retrieval", {"items": 10, "length": 25})
    for contamination in (0.2, 0.5):
        _, found, same = drawn("noisy_retrieval", {"items": 10, "length": 25, "contamination": contamination})
        np.testing.assert_array_equal(found[:, 10:], inputs[:, 10:])
        np.testing.assert_array_equal(found[..., clean.channels :], inputs[..., clean.channels :])
        np.testing.assert_array_equal(same, targets)
        changed = (found != inputs).any(axis=2).sum(axis=1)
        np.testing.assert_array_equal(changed, np.full(CASES, round(10 * contamination)))


def batches_of(loader, rounds):
    found = []
    for number in rounds:
        loader.sampler.set_epoch(number)
        found += list(loader)
    return found


def assert_same(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)


def test_batches_depend_on_the_seed_and_the_step_alone():
    tasks = [make_position_task("mqar", {"length": length, "items": 2}) for length in (8, 12)]
    whole = batches_of(training_positions(tasks, 3, 12, seed=5), [0])
    assert {batch.inputs.size(1) for batch in whole} == {8, 12}, "steps draw one of the tasks"
    assert_same(batches_of(training_positions(tasks, 3, 4, seed=5), [0, 1, 2]), whole)
    resumed = training_positions(tasks, 3, 4, seed=5)
    resumed.sampler.set_epoch(1)
    resumed.sampler.skip(3, 1)
    assert_same(list(resumed), whole[7:8])
    other = batches_of(training_positions(tasks, 3, 12, seed=6), [0])
    assert not all(torch.equal(one.inputs, two.inputs) for one, two in zip(whole, other, strict=True))


def test_no_global_generator_is_read():
    tasks = [make_position_task("noisy_retrieval", {})]
    states = torch.get_rng_state(), np.random.get_state()[1].copy()
    batches_of(training_positions(tasks, 2, 2, seed=0), [0])
    list(fixed_positions(tasks, "test", 3, 2))
    assert torch.equal(states[0], torch.get_rng_state())
    np.testing.assert_array_equal(states[1], np.random.get_state()[1])


def test_fixed_sets_are_fixed_and_differ_by_split():
    task = make_position_task("mqar", {"length": 16, "items": 2})
    (first, rest) = list(fixed_positions([task], "test", 5, 3))
    assert (len(first.inputs), len(rest.inputs)) == (3, 2)
    assert_same(list(fixed_positions([task], "test", 5, 3)), [first, rest])
    assert not torch.equal(task.fixed("validation", 5).inputs, task.fixed("test", 5).inputs)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mqra", {}, "unknown dataset of task sequence_labels 'mqra'; did you mean 'mqar'"),
        ("mqar", {"pairs": 4}, "unknown option of mqar 'pairs'"),
        ("mqar", {"length": 15, "items": 2}, "length=15 must be even"),
        ("mqar", {"length": 14, "items": 4}, r"at least 4 \* items = 16"),
        ("mqar", {"items": 8, "vocabulary": 16}, r"vocabulary=16 must be at least .* = 18"),
        ("mqar", {"length": "64"}, "length='64' must be a whole number of at least 1"),
        ("induction_heads", {"length": 2}, "length=2 must be at least 3"),
        ("selective_copying", {"length": 9, "items": 5}, r"at least 2 \* items = 10"),
        ("majority", {"length": 9}, "length=9 must be even"),
        ("parity", {"length": 1}, "length=1 must be at least 2"),
        ("noisy_retrieval", {"items": 1}, "items=1 must be at least 2"),
        ("noisy_retrieval", {"length": 16}, "length=16 must be more than items=16"),
        ("noisy_retrieval", {"contamination": 0.6}, "contamination=0.6 must be"),
    ],
)
def test_bad_options(name, options, message):
    with pytest.raises(InputError, match=message) as raised:
        make_position_task(name, options)
    assert "\n" not in str(raised.value)
