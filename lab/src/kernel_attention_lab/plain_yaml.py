"""YAML as plain values: numbers, strings, lists, mappings. Reading it creates no objects and runs no code."""

from __future__ import annotations

import re
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import yaml

from kernel_attention.errors import InputError, reading, require_file


def read_yaml(path: Path) -> Any:
    """The content of a file; InputError where it is unreadable, is not YAML, or has a key twice."""
    require_file(path)
    try:
        with reading(path):
            text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not valid YAML ({error})") from None
    return parse_yaml(text, str(path))


def parse_yaml(text: str, source: str) -> Any:
    """The value of ``text``; InputError, which begins with ``source``, where it is not YAML."""
    try:
        value = yaml.load(text, _Loader)  # a SafeLoader
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise InputError(f"{source}: not valid YAML ({' '.join(str(error).split())})") from None
    _require_small(value, source)
    return value


def key_lines(keys: dict[str, Any]) -> str:
    """The keys as YAML, a line each, in their order."""
    end = "...\n"  # of a document that is one plain value
    lines = []
    for key, value in keys.items():
        text = yaml.safe_dump(
            value, default_flow_style=True, sort_keys=False, width=float("inf"), allow_unicode=True
        )
        lines.append(f"{key}: {text.removesuffix(end).strip()}\n")
    return "".join(lines)


def _require_small(value: Any, source: str) -> None:
    """InputError for a huge value from a few lines of nested aliases, before any code traverses it."""
    waiting, count = [value], 0
    while waiting:
        count += 1
        if count > _MOST_VALUES:
            raise InputError(f"{source}: holds more than {_MOST_VALUES} values, its aliases written out")
        entry = waiting.pop()
        if isinstance(entry, dict):
            waiting += entry.values()
        elif isinstance(entry, list):
            waiting += entry


_MOST_VALUES = 100_000


# The parser in C, though faster, ends the process on some damaged files.
class _Loader(yaml.SafeLoader):
    """Reads 1e-3 as a number, as YAML 1.2 does, and refuses duplicate keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            problem = f"key {twice!r} is given twice"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
