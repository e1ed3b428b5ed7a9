"""Files of recipes or of suites: one alone, or a family, which is common keys and a table of what differs.

The table lies under the key ``recipes`` or ``suites`` and has an entry for each of them, by name. A key of an
entry replaces the family's.
"""

from __future__ import annotations

import copy
import functools
import importlib.resources
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

from kernel_attention.errors import InputError, unknown
from kernel_attention_lab.plain_yaml import read_yaml

Kind = Literal["recipe", "suite"]

ALONE = ""
"""The entry of a recipe or a suite that has a file of its own."""
FILE_NAME = re.compile(r"\w[\w.+-]*")
"""Names that name files or folders too: of entries, of rows and columns of suites, of records."""


class FileEntry(NamedTuple):
    """A file, and the name of an entry in it."""

    path: Path
    entry: str

    def __str__(self) -> str:
        return f"{self.path}/{self.entry}" if self.entry else str(self.path)

    @property
    def name(self) -> str:
        """Its name, in a word that can name a folder."""
        return self.entry or self.path.stem


def recipes_dir() -> Path:
    """The folder of the shipped recipes: inside the installed package, or next to ``src`` in a checkout."""
    installed = Path(str(importlib.resources.files("kernel_attention_lab"))) / "recipes"
    return installed if installed.is_dir() else Path(__file__).parents[2] / "recipes"


def find_file(name: str) -> FileEntry | None:
    """The file that a user names: ``file.yaml``, or ``file.yaml/entry``; None where there is no such file."""
    if Path(name).is_file():
        return FileEntry(Path(name), ALONE)
    owner, _, entry = name.rpartition("/")
    return FileEntry(Path(owner), entry) if Path(owner).is_file() else None


def read_entry(location: FileEntry, kind: Kind, asked: str) -> dict[str, Any]:
    """The keys of a recipe or a suite.

    Args:
        location: where it is.
        kind: what it is.
        asked: the name by which the user asked for it.

    Raises:
        InputError: for a family without the name of an entry, an unknown entry, or a wrong file.
    """
    entries = read_entries(location.path, kind)
    if location.entry in entries:
        return copy.deepcopy(entries[location.entry])
    names = list(entries)
    if names == [ALONE]:
        raise InputError(f"{kind} {asked}: {location.path} holds one {kind} (accepted: {location.path})")
    if location.entry == ALONE:
        raise InputError(
            f"{kind} {asked} is a family: give one of its {kind}s, such as {asked}/{names[0]} "
            f"(accepted: {', '.join(names)})"
        )
    raise unknown(f"{kind} of {location.path}", location.entry, names)


def read_entries(path: Path, kind: Kind) -> dict[str, dict[str, Any]]:
    """The keys of everything in a file, by the name of the entry. They are not to be changed.

    Raises:
        InputError: for a file that is neither a mapping nor a family.
    """
    return _read_shipped(path, kind) if recipes_dir() in path.parents else _read(path, kind)


@functools.cache
def _read_shipped(path: Path, kind: Kind) -> dict[str, dict[str, Any]]:
    """``_read`` of a file that does not change; a suite asks for its recipes once per cell."""
    return _read(path, kind)


def _read(path: Path, kind: Kind) -> dict[str, dict[str, Any]]:
    keys = read_keys(path)
    if table_of(kind) not in keys:
        return {ALONE: keys}
    table = keys.pop(table_of(kind))
    if not isinstance(table, dict) or not table:
        raise InputError(
            f"{path}: {table_of(kind)} must be a mapping from names to keys, found {table!r:.40}"
        )
    for name, own in table.items():
        if not isinstance(name, str) or FILE_NAME.fullmatch(name) is None:
            raise InputError(
                f"{path}: {kind} {name!r} must be letters, digits and . _ + -, as it names folders"
            )
        if not isinstance(own, dict):
            raise InputError(
                f"{path}: {kind} {name} must have lines of the form key: value, found {own!r:.40}"
            )
    return {name: keys | own for name, own in table.items()}


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a file; InputError where it is no mapping."""
    values = read_yaml(path)
    if not isinstance(values, dict):
        raise InputError(f"{path}: expected lines of the form key: value, found {type(values).__name__}")
    return values


def table_of(kind: Kind) -> str:
    """The key of the table of a family."""
    return f"{kind}s"
