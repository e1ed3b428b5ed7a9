"""Settings as users type them, and those of every command and task."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from kernel_attention.errors import InputError
from kernel_attention.fields import Count, Number, field_names
from kernel_attention_lab.arguments import field_helps, from_text
from kernel_attention_lab.options import COMMANDS
from kernel_attention_lab.plain_yaml import parse_yaml, read_yaml
from kernel_attention_lab.tasks.registry import recipe_class, task_names


@dataclass(frozen=True)
class Base:
    """Settings of a base.

    Args:
        count: how many; a long
            explanation.
    """

    count: Count = 1


@dataclass(frozen=True)
class Example(Base):
    """Settings of several kinds.

    Args:
        word: a name.

    Not of this: it stands after the arguments.
    """

    number: Number = 0.0
    flag: bool = False
    word: str = ""
    choice: Literal["one", "two"] = "one"
    numbers: list[int] = field(default_factory=list)
    maybe: int | None = None
    mapping: dict[str, int] = field(default_factory=dict)
    mappings: list[dict[str, int]] = field(default_factory=list)
    anything: Any = None


def test_what_is_typed_is_read_as_yaml_but_for_words():
    for name, text, value in (
        ("count", "3", 3), ("number", "1e-3", 0.001), ("flag", "true", True), ("word", "1e-3", "1e-3"),
        ("word", "null", "null"), ("choice", "two", "two"), ("numbers", "[1, 2]", [1, 2]), ("maybe", "4", 4),
        ("mapping", "{a: 1}", {"a": 1}), ("mappings", "[{a: 1}]", [{"a": 1}]),
        ("anything", "{primal: {eta: 1e-2}}", {"primal": {"eta": 0.01}}),
    ):  # fmt: skip
        assert from_text(Example, name, text, f"--{name} {text!r}") == value
    with pytest.raises(InputError, match=r"^--count '1.5' must be a whole number of at least 1$"):
        from_text(Example, "count", "1.5", "--count '1.5'")
    with pytest.raises(InputError, match=r"^--anything '\{': not valid YAML"):
        from_text(Example, "anything", "{", "--anything '{'")


def test_helps_are_the_docstrings_of_the_class_and_its_bases():
    assert field_helps(Example) == {"count": "how many; a long explanation.", "word": "a name."}


@pytest.mark.parametrize("settings", [*COMMANDS.values(), *map(recipe_class, task_names())])
def test_every_option_and_key_is_explained(settings):
    assert set(field_names(settings)) <= set(field_helps(settings))


def test_nested_aliases_do_not_fill_the_memory(tmp_path):
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]" for level in range(1, 10)]
    (tmp_path / "bomb.yaml").write_text("\n".join(lines))
    with pytest.raises(InputError, match="holds more than 100000 values, its aliases written out"):
        read_yaml(tmp_path / "bomb.yaml")
    with pytest.raises(InputError, match="holds more than 100000 values"):
        parse_yaml("&a [*a]", "here")
    layers = parse_yaml("[&rpc {rpc: {iterations: 4}}, *rpc]", "here")
    assert layers == [{"rpc": {"iterations": 4}}] * 2
