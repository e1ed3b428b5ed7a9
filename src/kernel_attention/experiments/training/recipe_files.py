"""Recipes as files. A file holds one recipe, or a family: the common keys, and a table of what differs.

A family is a mapping whose key ``recipes`` has an entry for each recipe. A key of an entry replaces the
family's. Comments above the first entry are about all recipes, and comments below an entry's name, further to
the right, are about that one. ``NAME`` in a comment stands for the name of the entry.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from kernel_attention.errors import InputError, unknown
from kernel_attention.experiments.plain_yaml import key_lines, read_yaml
from kernel_attention.experiments.settings import field_names
from kernel_attention.experiments.training.recipe import check_keys

_TABLE = "recipes"
_ALONE = ""  # the name of a recipe that has its file to itself
_NAME = re.compile(r"\w[\w.+-]*")


class _Place(NamedTuple):
    """A file, and the name of a recipe in it."""

    path: Path
    entry: str


def recipes_dir() -> Path:
    """The folder of the shipped recipes: inside the installed package, or next to ``src`` in a checkout."""
    installed = Path(str(importlib.resources.files("kernel_attention"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[4] / "recipes"


def list_recipes() -> dict[str, Path]:
    """Name (for example ``uea/japanese_vowels``) and file of every shipped recipe; a family has one file."""
    return {
        f"{name}/{entry}" if entry else name: path
        for name, path in _shipped_files().items()
        for entry in _recipes_in(path)
    }


def is_recipe(name: str) -> bool:
    """Whether a shipped recipe has this name, or a file that may hold it is there."""
    return _find(name) is not None


def read_recipe(name: str) -> tuple[str, dict[str, Any]]:
    """A recipe -> (its short name, its keys). The task must know the keys; ``make_recipe`` checks the values.

    Args:
        name: the name of a shipped recipe; a YAML file; or, in the file of a family, ``family.yaml/entry``.

    Raises:
        InputError: for an unknown name, a family without the name of an entry, or a wrong file.
    """
    path, entry = _place(name)
    keys = _recipes_in(path)[entry]
    check_keys(keys, f"{path}/{entry}" if entry else str(path))
    return entry or path.stem, copy.deepcopy(keys)


def recipe_text(name: str) -> str:
    """The text of a file with this recipe alone: the comments that explain it, and all its keys.

    Raises:
        InputError: as ``read_recipe``.
    """
    _, keys = read_recipe(name)
    path, entry = _place(name)
    text = path.read_text(encoding="utf-8")
    if entry == _ALONE:
        return text
    comments = "".join(f"{line}\n" for line in _comments(text, entry))
    order = ["task", *field_names(check_keys(keys, name))]
    ordered = {key: keys[key] for key in sorted(keys, key=order.index)}
    return re.sub(r"\bNAME\b", entry, comments) + key_lines(ordered)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys in the file of a single recipe."""
    keys = _mapping(path)
    check_keys(keys, str(path))
    return keys


def _place(name: str) -> _Place:
    """The place of a recipe; InputError where there is none."""
    place = _find(name)
    if place is None:
        raise unknown(
            "recipe", name, list_recipes(), listing="kernel-attention list recipes; or give a YAML file"
        )
    names = list(_recipes_in(place.path))
    if place.entry in names:
        return place
    if names == [_ALONE]:
        raise InputError(
            f"recipe {name}: {place.path} holds one recipe and no family of them (accepted: {place.path})"
        )
    if place.entry == _ALONE:
        raise InputError(
            f"recipe {name} is a family: give one of its recipes, such as {name}/{names[0]} "
            f"(accepted: {', '.join(names)})"
        )
    raise unknown(f"recipe of {place.path}", place.entry, names)


def _find(name: str) -> _Place | None:
    """Where a recipe is, as far as the names of files and of shipped recipes tell."""
    files = _shipped_files()
    owner, _, entry = name.rpartition("/")
    if name in files:
        return _Place(files[name], _ALONE)
    if owner in files and entry and entry in _recipes_in(files[owner]):
        return _Place(files[owner], entry)
    if Path(name).is_file():
        return _Place(Path(name), _ALONE)
    if Path(owner).is_file():
        return _Place(Path(owner), entry)
    return None


def _shipped_files() -> dict[str, Path]:
    """The shipped files by their path without suffix."""
    root = recipes_dir()
    paths = sorted(path for path in root.rglob("*.yaml") if path.parent != root / "suites")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def _recipes_in(path: Path) -> dict[str, dict[str, Any]]:
    """The keys of every recipe in a file."""
    return _read_shipped(path) if recipes_dir() in path.parents else _read(path)


@functools.cache
def _read_shipped(path: Path) -> dict[str, dict[str, Any]]:
    """``_read`` of a file that does not change; a suite asks for its recipes once per cell."""
    return _read(path)


def _read(path: Path) -> dict[str, dict[str, Any]]:
    keys = _mapping(path)
    if _TABLE not in keys:
        return {_ALONE: keys}
    table = keys.pop(_TABLE)
    if not isinstance(table, dict) or not table:
        raise InputError(f"{path}: {_TABLE} must be a mapping from names to keys, found {table!r}")
    for name, own in table.items():
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise InputError(
                f"{path}: recipe {name!r} must be letters, digits and . _ + -, as it names run folders"
            )
        if not isinstance(own, dict):
            raise InputError(f"{path}: recipe {name} must have lines of the form key: value, found {own!r}")
    return {name: keys | own for name, own in table.items()}


def _mapping(path: Path) -> dict[str, Any]:
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of the form key: value, found {type(values).__name__}")
    return values


def _comments(text: str, entry: str) -> list[str]:
    """The lines of comments about an entry of a family: those about all, an empty one, its own."""
    root = yaml.compose(text, yaml.SafeLoader)
    table = next(value for key, value in root.value if key.value == _TABLE)
    marks = {key.value: key.start_mark for key, _ in table.value}
    starts = [mark.line for mark in marks.values()]
    begin, indent = marks[entry].line, " " * (marks[entry].column + 1)
    end = min((line for line in starts if line > begin), default=table.end_mark.line)
    lines = text.splitlines()
    about_all = _only_comments(lines[: min(starts)])
    own = _only_comments(line for line in lines[begin:end] if line.startswith(indent))
    return [*about_all, *(["#"] if about_all and own else []), *own]


def _only_comments(lines: Iterable[str]) -> list[str]:
    return [line.strip() for line in lines if line.lstrip().startswith("#")]
