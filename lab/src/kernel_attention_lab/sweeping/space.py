"""The space of a sweep: for every key of a recipe that varies, its values or its range."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import checked, field_names, field_schema, plain
from kernel_attention_lab.plain_yaml import parse_yaml, read_yaml
from kernel_attention_lab.tasks.recipe import BaseRecipe

_FIXED = {
    "seeds": "its figures are averaged over the seeds of a point, which --seeds sets",
    "dataset": "figures of different data cannot be compared",
    "protocol": "figures of different protocols cannot be compared",
    "plugins": "they are imported once, before the first point",
}


@dataclass(frozen=True)
class Choices:
    """A key's values, in the order given."""

    values: list[Any]

    def labels(self) -> list[str]:
        """The values as JSON: names for the study, which keeps single values alone."""
        return [json.dumps(value) for value in self.values]


@dataclass(frozen=True)
class Range:
    """The numbers from ``low`` to ``high``, both included.

    Args:
        low: the smallest number.
        high: the largest number.
        log: draw the logarithm uniformly instead of the number.
        step: distance from one number to the next; None for all of them.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None


Space: TypeAlias = dict[str, Choices | Range]


def read_space(
    recipe: type[BaseRecipe], grid: Sequence[str] = (), ranges: Sequence[str] = (), file: str | None = None
) -> Space:
    """The space of the command line's words and of a file.

    Args:
        recipe: the class whose keys vary.
        grid: ``KEY=VALUE,VALUE,...`` or ``KEY=[VALUE, VALUE]``, values as YAML.
        ranges: ``KEY=LOW,HIGH``, ``KEY=LOW,HIGH,log`` or ``KEY=LOW,HIGH,STEP``.
        file: YAML with the key ``space``: a list of values for each key, or ``{low, high, log, step}``.

    Raises:
        InputError: for an unknown key, a key given twice, and a value that the recipe does not accept.
    """
    given = [] if file is None else list(_file_entries(Path(file)).items())
    given += [_split(word, "--grid") for word in grid]
    for key, values in (_split(word, "--range") for word in ranges):
        given.append((key, _range_of_words(key, values)))
    if not given:
        raise InputError("a sweep needs a space: --grid KEY=VALUES, --range KEY=LOW,HIGH or --space FILE")
    space: Space = {}
    for key, entry in given:
        if key in space:
            raise InputError(f"space: key {key} is given twice")
        space[key] = _dimension(recipe, key, entry)
    return space


def grid_points(space: Mapping[str, Choices | Range]) -> Iterator[dict[str, Any]]:
    """Every combination of the values; the last key varies fastest.

    Raises:
        InputError: for a range, which has no list of values.
    """
    values = []
    for key, dimension in space.items():
        if isinstance(dimension, Range):
            raise InputError(f"space: {key} is a range, and a grid takes values (or give --sampler tpe)")
        values.append(dimension.values)
    return (dict(zip(space, combination, strict=True)) for combination in itertools.product(*values))


def examples(space: Mapping[str, Choices | Range]) -> Iterator[dict[str, Any]]:
    """Points that have every value of every key once, and both ends of its range."""
    ends = {
        key: entry.values if isinstance(entry, Choices) else [entry.low, entry.high]
        for key, entry in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        yield from (first | {key: value} for value in values[1:])


def space_as_json(space: Mapping[str, Choices | Range]) -> dict[str, Any]:
    """The space as ``sweep.json`` holds it, and as a space file may."""
    return {
        key: entry.values if isinstance(entry, Choices) else dataclasses.asdict(entry)
        for key, entry in space.items()
    }


def space_from_json(recipe: type[BaseRecipe], content: Mapping[str, Any]) -> Space:
    """The space that ``space_as_json`` wrote; InputError for another content."""
    return {key: _dimension(recipe, key, entry) for key, entry in content.items()}


def _file_entries(path: Path) -> dict[str, Any]:
    content = read_yaml(path)
    if not isinstance(content, dict) or not isinstance(content.get("space"), dict):
        raise InputError(f"{path}: expected the key space with the values of every key below it")
    for key in content:
        if key != "space":
            raise unknown(f"key of {path}", key, ["space"])
    return {str(key): entry for key, entry in content["space"].items()}


def _split(word: str, option: str) -> tuple[str, list[Any]]:
    """The key of ``KEY=VALUES`` and its values."""
    key, equals, text = word.partition("=")
    if not equals or not key.strip() or not text.strip():
        raise InputError(f"{option} {word!r} must be KEY=VALUES, such as learning_rate=0.001,0.01")
    text = text.strip()
    values = parse_yaml(text if text.startswith("[") else f"[{text}]", f"{option} {word!r}")
    return key.strip().replace("-", "_"), values


def _range_of_words(key: str, values: list[Any]) -> dict[str, Any]:
    if not 2 <= len(values) <= 3:
        raise InputError(f"--range {key} must be LOW,HIGH or LOW,HIGH,log or LOW,HIGH,STEP")
    content = {"low": values[0], "high": values[1]}
    if len(values) == 3:
        content |= {"log": True} if values[2] == "log" else {"step": values[2]}
    return content


def _dimension(recipe: type[BaseRecipe], key: str, entry: Any) -> Choices | Range:
    accepted = [name for name in field_names(recipe) if name not in _FIXED]
    if key in _FIXED:
        raise InputError(f"space: {key} cannot vary in a sweep: {_FIXED[key]}")
    if key not in accepted:
        raise unknown("key of the space", key, accepted, listing="kernel-attention train --help")
    if isinstance(entry, list):
        return _choices(recipe, key, entry)
    if isinstance(entry, dict):
        return _range(recipe, key, entry)
    raise InputError(f"space: {key} must be a list of values, or a range {{low: ..., high: ...}}")


def _choices(recipe: type[BaseRecipe], key: str, entry: list[Any]) -> Choices:
    if not entry:
        raise InputError(f"space: {key} has no values")
    choices = Choices([plain(checked(recipe, key, value)) for value in entry])
    labels = choices.labels()
    for value, label in zip(choices.values, labels, strict=True):
        if labels.count(label) > 1:
            raise InputError(f"space: {key} has the value {value!r} twice")
    return choices


def _range(recipe: type[BaseRecipe], key: str, entry: dict[str, Any]) -> Range:
    names = field_names(Range)
    for name in entry:
        if name not in names:
            raise unknown(f"entry of the range of {key}", name, names)
    kind = field_schema(recipe, key).get("type")
    if kind not in ("integer", "number"):
        raise InputError(f"space: {key} takes no numbers, so it has values and no range")
    if "low" not in entry or "high" not in entry:
        raise InputError(f"space: the range of {key} needs low and high")
    low, high = (checked(recipe, key, entry[name]) for name in ("low", "high"))
    log, step = entry.get("log", False), entry.get("step")
    if not low < high:
        raise InputError(f"space: the range of {key} must have low below high, found {low} and {high}")
    if not isinstance(log, bool):
        raise InputError(f"space: log of the range of {key} must be true or false, found {log!r}")
    if log and low <= 0:
        raise InputError(f"space: the range of {key} has log, so low must be above 0, found {low}")
    if step is not None:
        if log:
            raise InputError(f"space: the range of {key} takes log or a step, not both")
        numbers = int if kind == "integer" else (int, float)
        is_number = isinstance(step, numbers) and not isinstance(step, bool)
        if not is_number or not math.isfinite(step) or not 0 < step <= high - low:
            words = "a whole number" if kind == "integer" else "a number"
            raise InputError(
                f"space: the step of {key} must be {words} above 0 and at most {high - low}, found {step!r}"
            )
    return Range(low, high, log, step)
