"""ListOps of Long Range Arena (Tay et al. 2021; Nangia & Bowman 2018), to the benchmark's specification.

An expression such as ``[MAX 4 [MED 1 9 3 ] 7 ]`` has a digit as its value. The root and every node below it
is an operation with probability 1/4, as deep as 10, of 2 to 10 arguments and an operator drawn from MIN, MAX,
MED and SM (sum modulo 10); otherwise it is a digit. Expressions of more than 500 and fewer than 2,000 tokens
are kept, each once. MED of an even number of arguments is the mean of the middle two, rounded down.

All expressions of a chunk are grown, evaluated and written at once, level by level.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kernel_attention.files import cache_folder
from kernel_attention_lab.child_process import process_pool
from kernel_attention_lab.data.tokens.sets import TokenData, TokenSplit, cached_arrays

LISTOPS_TOKENS = (*"0123456789", "[MIN", "[MAX", "[MED", "[SM", "]")
"""Token number -> text; the benchmark leaves the parentheses of the original format out, too."""

SIZES = {"train": 96_000, "validation": 2_000, "test": 2_000}

_MIN, _MAX, _MED, _SM, _END = range(10, 15)
_VERSION = 1  # of the generator; a new version keeps its output apart from an old cache
_CHUNK = 16_000  # trees grown at once, which take some tens of MB


class Specification(NamedTuple):
    """Depth, arguments and lengths, by default the benchmark's; both lengths are excluded."""

    max_depth: int = 10
    max_arguments: int = 10
    min_length: int = 500
    max_length: int = 2000
    operation_probability: float = 0.25


SHORT = Specification(min_length=30, max_length=100)
"""Expressions that a small model can learn in an hour on a processor."""


class _Level(NamedTuple):
    """Nodes of one depth, children of one node side by side. arity 0: a digit."""

    parent: np.ndarray
    arity: np.ndarray
    operator: np.ndarray
    digit: np.ndarray


def load_listops(
    root: Path | None,
    train_cases: int = 0,
    evaluation_cases: int = 0,
    workers: int = 0,
    specification: Specification | None = None,
) -> TokenData:
    """The data set from the cache, generated on first use.

    Args:
        root: its folder ``generated`` holds the cache if it is writable, else the user's cache folder does.
        train_cases: size of the training split, by default 96,000.
        evaluation_cases: size of the validation and of the test split, by default 2,000.
        workers: processes; 0 is as many as there are cores. The result does not depend on it.
        specification: another one than the benchmark's.
    """
    wanted = specification or Specification()
    sizes = dict(SIZES)
    sizes["train"] = train_cases or sizes["train"]
    for split in ("validation", "test"):
        sizes[split] = evaluation_cases or sizes[split]
    total = sum(sizes.values())
    folder = root if root is not None and os.access(root, os.W_OK) else cache_folder()
    other = "" if wanted == Specification() else "".join(f"-{value}" for value in wanted)
    path = folder / "generated" / f"listops-v{_VERSION}{other}-{total}.npz"
    arrays = cached_arrays(
        path, lambda: generate_listops(total, specification=wanted, workers=workers)._asdict()
    )
    whole = TokenSplit(arrays["tokens"], arrays["offsets"], arrays["targets"])
    bounds = np.cumsum([0, *sizes.values()])
    splits = [part(whole, begin, end) for begin, end in pairwise(bounds)]
    digits = tuple(LISTOPS_TOKENS[:10])
    name = f"listops_{wanted.max_length}" if other else "lra/listops"
    sizes_of = (len(LISTOPS_TOKENS), wanted.max_length)
    return TokenData(name, splits[0], splits[1], splits[2], *sizes_of, digits)


def part(split: TokenSplit, begin: int, end: int) -> TokenSplit:
    """Cases begin to end - 1 of a split of single sequences."""
    offsets = split.offsets[begin : end + 1]
    return TokenSplit(split.tokens[offsets[0] : offsets[-1]], offsets - offsets[0], split.targets[begin:end])


class Expressions(NamedTuple):
    """tokens end to end (uint8), offsets (cases + 1,) and targets (cases,), as in ``TokenSplit``."""

    tokens: np.ndarray
    offsets: np.ndarray
    targets: np.ndarray


def generate_listops(
    cases: int, seed: int = 0, specification: Specification | None = None, workers: int = 1
) -> Expressions:
    """A number of different expressions.

    Args:
        cases: the number.
        seed: the same seed gives the same expressions.
        specification: depth, arguments and lengths.
        workers: processes; 0 is as many as there are cores. The result does not depend on it.
    """
    found: list[tuple[np.ndarray, int]] = []
    seen: set[bytes] = set()
    for chunk in _chunks(partial(_grow_chunk, seed, specification or Specification()), workers, cases):
        for begin, end, value in zip(chunk.offsets[:-1], chunk.offsets[1:], chunk.targets, strict=True):
            expression = chunk.tokens[begin:end]
            key = expression.tobytes()
            if key not in seen and len(found) < cases:
                seen.add(key)
                found.append((expression, int(value)))
        if len(found) == cases:
            break
    split = TokenSplit.of([expression for expression, _ in found], [value for _, value in found])
    return Expressions(split.tokens, split.offsets, split.targets)


def _chunks(grow: partial[Expressions], workers: int, cases: int) -> Iterator[Expressions]:
    """Chunk 0, 1, 2, ... without end, made by this number of processes."""
    workers = workers or os.cpu_count() or 1
    if workers == 1 or cases < 2000:  # a process takes longer to start than to grow so few
        number = 0
        while True:
            yield grow(number)
            number += 1
    with process_pool(workers) as pool:
        pending = [pool.submit(grow, number) for number in range(2 * workers)]
        number = len(pending)
        try:
            while True:
                yield pending.pop(0).result()
                pending.append(pool.submit(grow, number))
                number += 1
        finally:
            for future in pending:
                future.cancel()


def _grow_chunk(seed: int, specification: Specification, number: int) -> Expressions:
    generator = np.random.default_rng([seed, number])
    levels = _grow(generator, specification)
    sizes = _sizes(levels)
    kept = np.flatnonzero((sizes[0] > specification.min_length) & (sizes[0] < specification.max_length))
    levels = _keep(levels, kept)
    return _write(levels, _sizes(levels), _evaluate(levels))


def _grow(generator: np.random.Generator, specification: Specification) -> list[_Level]:
    parent = np.zeros(_CHUNK, dtype=np.int64)
    levels = []
    for depth in range(1, specification.max_depth + 1):
        size = len(parent)
        count = generator.integers(2, specification.max_arguments, size, endpoint=True)
        is_operation = generator.random(size) <= specification.operation_probability
        count = np.where(is_operation & (depth < specification.max_depth), count, 0)
        levels.append(
            _Level(
                parent,
                count,
                generator.integers(_MIN, _SM, size, endpoint=True),
                generator.integers(0, 10, size),
            )
        )
        parent = np.repeat(np.arange(size), count)
        if not len(parent):
            break
    return levels


def _keep(levels: list[_Level], roots: np.ndarray) -> list[_Level]:
    """The trees of these roots only."""
    kept, chosen = [], roots
    parent = np.zeros(len(roots), dtype=np.int64)
    for depth, level in enumerate(levels):
        kept.append(_Level(parent, level.arity[chosen], level.operator[chosen], level.digit[chosen]))
        if depth + 1 == len(levels):
            break
        number = np.full(len(level.arity), -1)
        number[chosen] = np.arange(len(chosen))
        below = number[levels[depth + 1].parent]
        chosen = np.flatnonzero(below >= 0)
        parent = below[chosen]
    return kept


def _sizes(levels: list[_Level]) -> list[np.ndarray]:
    """Tokens of the subtree at every node: 1 for a digit, operator, arguments and ``]`` for an operation."""
    sizes = [np.where(level.arity > 0, 2, 1) for level in levels]
    for depth in range(len(levels) - 1, 0, -1):
        np.add.at(sizes[depth - 1], levels[depth].parent, sizes[depth])
    return sizes


def _evaluate(levels: list[_Level]) -> np.ndarray:
    """Values of the roots."""
    below = np.zeros(0, dtype=np.int64)
    for depth in range(len(levels) - 1, -1, -1):
        level = levels[depth]
        values = level.digit.copy()
        operations = np.flatnonzero(level.arity)
        if len(operations):
            count, operator = level.arity[operations], level.operator[operations]
            first = np.cumsum(count) - count
            owner = np.repeat(np.arange(len(operations)), count)
            ordered = below[np.lexsort((below, owner))]  # each operation's arguments in ascending order
            middle = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) // 2
            total = np.add.reduceat(below, first) % 10
            choices = [ordered[first], ordered[first + count - 1], middle, total]
            values[operations] = np.choose(operator - _MIN, choices)
        below = values
    return below


def _write(levels: list[_Level], sizes: list[np.ndarray], values: np.ndarray) -> Expressions:
    offsets = np.concatenate([[0], np.cumsum(sizes[0])])
    tokens = np.empty(offsets[-1], dtype=np.uint8)
    start = offsets[:-1]
    for depth, level in enumerate(levels):
        if depth:
            # After the parent's operator and earlier siblings, because children of a node are adjacent.
            before = np.cumsum(sizes[depth]) - sizes[depth]
            is_first = np.concatenate([[True], level.parent[1:] != level.parent[:-1]])
            base = before[np.flatnonzero(is_first)][np.cumsum(is_first) - 1]
            start = start[level.parent] + 1 + before - base
        is_operation = level.arity > 0
        tokens[start] = np.where(is_operation, level.operator, level.digit)
        tokens[start[is_operation] + sizes[depth][is_operation] - 1] = _END
    return Expressions(tokens, offsets, values)
