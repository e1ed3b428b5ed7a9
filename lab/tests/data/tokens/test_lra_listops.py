"""ListOps: every expression has its label as its value, and is what the benchmark allows."""

from __future__ import annotations

import re

import numpy as np
import pytest

from kernel_attention_lab.data.tokens import lra_listops
from kernel_attention_lab.data.tokens.lra_listops import (
    LISTOPS_TOKENS,
    SHORT,
    Specification,
    generate_listops,
    load_listops,
)

SMALL = Specification(max_depth=4, max_arguments=5, min_length=3, max_length=40)


def texts(expressions):
    for begin, end in zip(expressions.offsets[:-1], expressions.offsets[1:], strict=True):
        yield " ".join(LISTOPS_TOKENS[token] for token in expressions.tokens[begin:end])


def value_and_depth(text):
    """An evaluator of its own: the innermost brackets are replaced by their value until a digit is left."""
    depth = 1
    while "[" in text:
        depth += 1
        text = re.sub(r"\[(MIN|MAX|MED|SM) ([0-9 ]+) \]", reduced, text)
    return int(text), depth


def reduced(match):
    operator, numbers = match[1], sorted(int(word) for word in match[2].split())
    assert 2 <= len(numbers) <= 10
    half = len(numbers) // 2
    if operator == "MED":
        return str(numbers[half] if len(numbers) % 2 else (numbers[half - 1] + numbers[half]) // 2)
    return str({"MIN": numbers[0], "MAX": numbers[-1], "SM": sum(numbers) % 10}[operator])


def test_the_evaluator_of_this_file_on_expressions_done_by_hand():
    assert value_and_depth("[MAX 4 [MED 1 9 3 ] 7 ]") == (7, 3)
    assert value_and_depth("[SM 9 [MED 1 4 2 9 ] 8 ]") == (0, 3)  # the mean of 2 and 4 is 3
    assert value_and_depth("[MED 1 2 ]") == (1, 2)  # 1.5, rounded down
    assert value_and_depth("[MIN 3 [SM 5 6 ] ]") == (1, 3)


def test_every_expression_has_its_label_as_its_value():
    expressions = generate_listops(150)
    lengths, depths = np.diff(expressions.offsets), []
    for text, target in zip(texts(expressions), expressions.targets, strict=True):
        value, depth = value_and_depth(text)
        assert value == target
        depths.append(depth)
    assert lengths.min() > 500
    assert lengths.max() < 2000
    assert max(depths) == 10, "and no deeper"
    assert len(set(texts(expressions))) == 150
    assert set(expressions.targets.tolist()) == set(range(10))


def test_the_specification_is_obeyed_when_it_is_another():
    expressions = generate_listops(2500, specification=SMALL)
    found = list(texts(expressions))
    assert len(set(found)) == 2500
    lengths = np.diff(expressions.offsets)
    assert (lengths.min(), lengths.max()) == (4, 39)
    checked = [value_and_depth(text) for text in found]
    assert [value for value, _ in checked] == expressions.targets.tolist()
    assert max(depth for _, depth in checked) == 4


def test_a_seed_gives_the_same_expressions_whatever_came_before():
    first, again, other = generate_listops(60), generate_listops(60), generate_listops(60, seed=1)
    assert np.array_equal(first.tokens, again.tokens)
    assert not np.array_equal(first.tokens[:500], other.tokens[:500])
    more = generate_listops(90)
    assert np.array_equal(more.tokens[: len(first.tokens)], first.tokens)


@pytest.mark.slow
def test_processes_do_not_change_the_result():
    alone, together = generate_listops(3000, workers=1), generate_listops(3000, workers=2)
    assert np.array_equal(alone.tokens, together.tokens)
    assert np.array_equal(alone.targets, together.targets)


def test_the_splits_are_disjoint_parts_and_come_back_from_the_cache(tmp_path, monkeypatch):
    data = load_listops(tmp_path, 30, 10)
    assert [len(split) for split in (data.train, data.validation, data.test)] == [30, 10, 10]
    cases = {
        split.case(i)[0].tobytes()
        for split in (data.train, data.validation, data.test)
        for i in range(len(split))
    }
    assert len(cases) == 50
    (cache,) = (tmp_path / "generated").iterdir()
    monkeypatch.setattr(lra_listops, "generate_listops", None)
    again = load_listops(tmp_path, 30, 10)
    assert np.array_equal(again.test.tokens, data.test.tokens)
    monkeypatch.undo()
    cache.write_bytes(cache.read_bytes()[:1000])  # damaged: made anew
    assert np.array_equal(load_listops(tmp_path, 30, 10).test.tokens, data.test.tokens)


def test_short_expressions(tmp_path):
    """Of more than 30 and fewer than 100 tokens, under a name and in a cache of their own."""
    load_listops(tmp_path, 30, 10, specification=SHORT)
    data = load_listops(tmp_path, 30, 10, specification=SHORT)
    assert (data.name, data.max_len) == ("listops_100", 100)
    lengths = np.concatenate([split.lengths for split in (data.train, data.validation, data.test)])
    assert 30 < lengths.min() <= lengths.max() < 100
    (cache,) = (tmp_path / "generated").iterdir()
    assert cache.name == "listops-v1-10-10-30-100-0.25-50.npz"


def test_the_operators_are_drawn_alike():
    text = " ".join(texts(generate_listops(400)))
    counts = np.array([text.count(name) for name in ("[MIN", "[MAX", "[MED", "[SM")])
    expected = counts.sum() / 4
    assert (np.abs(counts - expected) < 5 * np.sqrt(expected)).all()
