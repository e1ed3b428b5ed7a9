"""The recipes that are shipped, and those in a user's files.

Comments in the file of a family are about all of its recipes where they stand above the first entry. Below
the name of an entry, and further to the right, they are about that one. ``NAME`` in them stands for its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import yaml

from kernel_attention.errors import unknown
from kernel_attention_lab.families import (
    ALONE,
    FileEntry,
    find_file,
    read_entries,
    read_entry,
    recipes_dir,
    table_of,
)
from kernel_attention_lab.plain_yaml import key_lines
from kernel_attention_lab.tasks.registry import check_keys


def list_recipes() -> dict[str, Path]:
    """Name (for example ``uea/japanese_vowels``) and file of every shipped recipe; a family has one file."""
    return {
        f"{name}/{entry}" if entry else name: path
        for name, path in _shipped_files().items()
        for entry in read_entries(path, "recipe")
    }


def is_recipe(name: str) -> bool:
    """Return whether a shipped recipe has this name, or there is a file that may hold it."""
    return _find(name) is not None


def read_recipe(name: str) -> tuple[str, dict[str, Any]]:
    """A recipe -> (its short name, its keys). The task must know the keys; ``make_recipe`` checks the values.

    Args:
        name: the name of a shipped recipe; a YAML file; or, in the file of a family, ``family.yaml/entry``.

    Raises:
        InputError: for an unknown name, a family without the name of an entry, or a wrong file.
    """
    location, keys = _read(name)
    return location.name, keys


def recipe_text(name: str) -> str:
    """The text of a file with this recipe alone: the comments that explain it, and all its keys.

    Raises:
        InputError: as ``read_recipe``.
    """
    location, keys = _read(name)
    text = location.path.read_text(encoding="utf-8")
    if location.entry == ALONE:
        return text
    comments = "".join(f"{line}\n" for line in _comments(text, location.entry))
    order = check_keys(keys, str(location))
    ordered = {key: keys[key] for key in sorted(keys, key=order.index)}
    return re.sub(r"\bNAME\b", location.entry, comments) + key_lines(ordered)


def _read(name: str) -> tuple[FileEntry, dict[str, Any]]:
    location = _find(name)
    if location is None:
        raise unknown(
            "recipe", name, list_recipes(), listing="kernel-attention list recipes; or give a YAML file"
        )
    keys = read_entry(location, "recipe", name)
    check_keys(keys, str(location))
    return location, keys


def _find(name: str) -> FileEntry | None:
    """The place of a recipe. Only the family that may have it is read: all take a third of a second."""
    files = _shipped_files()
    if name in files:
        return FileEntry(files[name], ALONE)
    family, _, entry = name.rpartition("/")
    if family in files and entry and entry in read_entries(files[family], "recipe"):
        return FileEntry(files[family], entry)
    return find_file(name)


def _shipped_files() -> dict[str, Path]:
    """The shipped files by their path without suffix."""
    root = recipes_dir()
    paths = sorted(path for path in root.rglob("*.yaml") if path.parent != root / "suites")
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in paths}


def _comments(text: str, entry: str) -> list[str]:
    """The lines of comments about an entry of a family: those about all, an empty one, its own."""
    root = yaml.compose(text, yaml.SafeLoader)
    table = next(value for key, value in root.value if key.value == table_of("recipe"))
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
