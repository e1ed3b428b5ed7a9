"""The space of a sweep: for every key of a recipe that varies, its values or its range."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from kernel_attention.errors import InputError, unknown
from kernel_attention.fields import checked, field_names, field_schema, plain
from kernel_attention_lab.plain_yaml import parse_yaml, read_yaml
from kernel_attention_lab.tasks.recipe import BaseRecipe

Space: TypeAlias = dict[str, list[Any] | dict[str, Any]]  # a key's values, or its low, high, log and step

_FIXED = {
    "seeds": "its figures are averaged over the seeds of a point, which --seeds sets",
    "dataset": "figures of different data cannot be compared",
    "protocol": "figures of different protocols cannot be compared",
    "plugins": "they are imported once, before the first point",
}
_RANGE = ("low", "high", "log", "step")


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
    given: list[tuple[str, Any]] = [] if file is None else list(_file_entries(Path(file)).items())
    given += [_split(word, "--grid") for word in grid]
    given += [
        (key, _range_of_words(key, values)) for key, values in (_split(word, "--range") for word in ranges)
    ]
    if not given:
        raise InputError("a sweep needs a space: --grid KEY=VALUES, --range KEY=LOW,HIGH or --space FILE")
    for number, (key, _) in enumerate(given):
        if key in dict(given[:number]):
            raise InputError(f"space: key {key} is given twice")
    return checked_space(recipe, dict(given))


def checked_space(recipe: type[BaseRecipe], content: Mapping[str, Any]) -> Space:
    """The space of plain values, as ``sweep.json`` and a file hold it; InputError for another content."""
    return {key: _checked_entry(recipe, key, entry) for key, entry in content.items()}


def grid_points(space: Space) -> Iterator[dict[str, Any]]:
    """Every combination of the values; the last key varies fastest.

    Raises:
        InputError: for a range, which has no list of values.
    """
    for key, entry in space.items():
        if isinstance(entry, dict):
            raise InputError(f"space: {key} is a range, and a grid takes values (or give --sampler tpe)")
    return (dict(zip(space, values, strict=True)) for values in itertools.product(*space.values()))


def examples(space: Space) -> Iterator[dict[str, Any]]:
    """Points that have every value of every key once, and both ends of its range."""
    ends = {
        key: entry if isinstance(entry, list) else [entry["low"], entry["high"]]
        for key, entry in space.items()
    }
    first = {key: values[0] for key, values in ends.items()}
    yield first
    for key, values in ends.items():
        yield from (first | {key: value} for value in values[1:])


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
    key, _, text = (part.strip() for part in word.partition("="))
    if not key or not text:
        raise InputError(f"{option} {word!r} must be KEY=VALUES, such as learning_rate=0.001,0.01")
    values = parse_yaml(text if text.startswith("[") else f"[{text}]", f"{option} {word!r}")
    return key.replace("-", "_"), values


def _range_of_words(key: str, values: list[Any]) -> dict[str, Any]:
    if not 2 <= len(values) <= 3:
        raise InputError(f"--range {key} must be LOW,HIGH or LOW,HIGH,log or LOW,HIGH,STEP")
    content = dict(zip(("low", "high", "step"), values, strict=False))
    return content | {"log": True, "step": None} if values[2:] == ["log"] else content


def _checked_entry(recipe: type[BaseRecipe], key: str, entry: Any) -> list[Any] | dict[str, Any]:
    accepted = [name for name in field_names(recipe) if name not in _FIXED]
    if key in _FIXED:
        raise InputError(f"space: {key} cannot vary in a sweep: {_FIXED[key]}")
    if key not in accepted:
        raise unknown("key of the space", key, accepted, listing="kernel-attention train --help")
    if isinstance(entry, dict):
        return _checked_range(recipe, key, entry)
    if not isinstance(entry, list):
        raise InputError(f"space: {key} must be a list of values, or a range {{low: ..., high: ...}}")
    if not entry:
        raise InputError(f"space: {key} has no values")
    values = [plain(checked(recipe, key, value)) for value in entry]
    labels = [json.dumps(value) for value in values]
    for value, label in zip(values, labels, strict=True):
        if labels.count(label) > 1:
            raise InputError(f"space: {key} has the value {value!r} twice")
    return values


def _checked_range(recipe: type[BaseRecipe], key: str, entry: dict[str, Any]) -> dict[str, Any]:
    for name in entry:
        if name not in _RANGE:
            raise unknown(f"entry of the range of {key}", name, _RANGE)
    kind = field_schema(recipe, key).get("type")
    if kind not in ("integer", "number"):
        raise InputError(f"space: {key} takes no numbers, so it has values and no range")
    if "low" not in entry or "high" not in entry:
        raise InputError(f"space: the range of {key} needs low and high")
    low, high = (checked(recipe, key, entry[name]) for name in ("low", "high"))
    log, step = entry.get("log", False), entry.get("step")
    is_number = isinstance(step, int if kind == "integer" else int | float) and not isinstance(step, bool)
    words = "a whole number" if kind == "integer" else "a number"
    for is_wrong, fault in (
        (not low < high, f"range of {key} must have low below high, found {low} and {high}"),
        (not isinstance(log, bool), f"log of the range of {key} must be true or false, found {log!r}"),
        (log and low <= 0, f"range of {key} has log, so low must be above 0, found {low}"),
        (log and step is not None, f"range of {key} takes log or a step, not both"),
        (
            step is not None and not (is_number and 0 < step <= high - low),
            f"step of {key} must be {words} above 0 and at most {high - low}, found {step!r}",
        ),
    ):
        if is_wrong:
            raise InputError(f"space: the {fault}")
    return {"low": low, "high": high, "log": log, "step": step}
