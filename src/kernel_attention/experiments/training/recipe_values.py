"""The values of a recipe's keys: their types, and what is said of a value of another type."""

from __future__ import annotations

import dataclasses
import functools
import math
from numbers import Integral, Real
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kernel_attention.errors import InputError

_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a name",
    list[int]: "whole numbers, such as [0, 1, 2]",
}


def field_names(recipe: type) -> list[str]:
    """Names of the keys of a class of recipes."""
    return [entry.name for entry in dataclasses.fields(recipe)]


def typed_value(recipe: type, name: str, value: Any, label: str | None = None) -> Any:
    """``value`` in the type of the key ``name``; InputError where it is of another type.

    Args:
        recipe: a class of recipes.
        name: one of its keys.
        value: what was given for it.
        label: what the message calls the two, by default ``name=value``.
    """
    kind = _field_types(recipe)[name]
    if not _is_of(kind, value):
        accepted = f"one of {', '.join(get_args(kind))}" if get_origin(kind) is Literal else _WORDS[kind]
        raise InputError(f"{label or f'{name}={value!r}'} must be {accepted}")
    if kind is int or kind is float:
        return kind(value)
    return [int(item) for item in value] if get_origin(kind) is list else value


def plain_attention(spec: Any) -> Any:
    """A pair (name, options) as ``{name: options}``: YAML would give it back as a list, one entry a layer."""
    if isinstance(spec, list):
        return [plain_attention(entry) for entry in spec]
    return {spec[0]: dict(spec[1])} if isinstance(spec, tuple) else spec


@functools.cache
def _field_types(recipe: type) -> dict[str, Any]:
    return get_type_hints(recipe)


def _is_of(kind: Any, value: Any) -> bool:
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return isinstance(value, str) and value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list | tuple) and all(_is_of(int, item) for item in value)
    if isinstance(value, bool):  # Python counts them among the integers
        return kind is bool
    if kind is float:
        return isinstance(value, Real) and math.isfinite(value)
    return isinstance(value, Integral if kind is int else kind)
