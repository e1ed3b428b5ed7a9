"""Run folders damaged at random, from a seed: what a disk, an editor or a script may leave behind."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 7, 10**12, -(10**12), 80_000_000_000, 2**63, 10**30, 0.0, 0.5, -0.5,
    1e-300, 1e30, 1e300, float("inf"), float("nan"), "", "a", "0", "softmax", "primal", "../..", "\u0000",
    "é" * 50, [], [0], [None], [[]], {}, {"a": 1}, {"softmax": {"rank": 3}}, {"primal": {"rank": 10**10}},
    [1, "a", {}],
)  # fmt: skip
TEXTS: tuple[bytes, ...] = (
    b"", b"\n", b"null", b"3", b"-1", b"1e999", b'"text"', b"[]", b"{}", b"[[]]", b"{", b"[" * 5000,
    b"\xff\xfe\x00", b"\xef\xbb\xbf{}", b"{'a': 1}", b"a: [", b"a: &a [*a]", b"- - - -", b"\x00" * 64,
    b"? !!python/object:os.system x", b'{"a": 1, "a": 2}', b"task: language", b"dataset: 3", b"9" * 5000,
    b"PK\x03\x04", b"PK\x05\x06" + b"\x00" * 18, b"<html>", b'[{"epoch": 1}]', b'{"layers": [{}]}',
    b'{"layers": 3}',
)  # fmt: skip

Damage = Callable[[Path, random.Random], None]


def truncate(path: Path, chance: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: chance.randrange(len(content))] if content else b"")


def flip(path: Path, chance: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(chance.choice((1, 1, 1, 3, 30)) if content else 0):
        content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
    path.write_bytes(content)


def overwrite(path: Path, chance: random.Random) -> None:
    """A stretch of other bytes, as a lost block leaves."""
    content = bytearray(path.read_bytes())
    if content:
        start = chance.randrange(len(content))
        stretch = min(len(content) - start, chance.choice((4, 64, 4096)))
        content[start : start + stretch] = (
            chance.randbytes(stretch) if chance.random() < 0.5 else bytes(stretch)
        )
    path.write_bytes(content)


def lengthen(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes() + chance.choice((b"\x00", b"\n}", b"a: 1\n", path.read_bytes())))


def replace(path: Path, chance: random.Random) -> None:
    path.write_bytes(chance.choice(TEXTS))


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


def link(path: Path, chance: random.Random) -> None:
    """To nothing, to itself, to a folder, to a device that never ends, to a whole copy elsewhere."""
    kept = path.with_name(f"{path.name}.kept")
    target = chance.choice(("nowhere", path.name, ".", "/dev/zero", "/dev/null", kept.name, "config.yaml"))
    if target == kept.name:
        path.rename(kept)
    else:
        path.unlink()
    path.symlink_to(target)


def other_kind(path: Path, chance: random.Random) -> None:
    path.unlink()
    if chance.random() < 0.5:
        path.mkdir()
    else:
        os.mkfifo(path)


def exchange(path: Path, chance: random.Random) -> None:
    """With another file of the run."""
    others = [other for other in path.parent.iterdir() if other.is_file() and other != path]
    if others:
        shutil.copyfile(chance.choice(sorted(others)), path)


def change_value(path: Path, chance: random.Random) -> None:
    """One value anywhere in JSON or YAML: of another type, huge, or gone."""
    load: Callable[[str], Any] = json.loads if path.suffix == ".json" else yaml.safe_load
    value = load(path.read_text())
    places = list(_places(value))
    # Of lists as long as a vocabulary no more than a few, so that other keys have their turn.
    container, key = chance.choice(
        [place for place in places if not isinstance(place[1], int) or place[1] < 4]
    )
    if chance.random() < 0.15:
        del container[key]
    else:
        container[key] = chance.choice(VALUES)
    path.write_text(json.dumps(value) if path.suffix == ".json" else yaml.safe_dump(value, sort_keys=False))


def _places(value: Any) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in list(items):
        yield value, key
        yield from _places(entry)


RAW: tuple[Damage, ...] = (truncate, flip, overwrite, lengthen, replace, delete, link, other_kind, exchange)


def damage(folder: Path, chance: random.Random) -> str:
    """Damage one or two files of a run folder; what was done, in words."""
    done = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        files = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "report.html")
        path = chance.choice(files)
        is_text = path.suffix in (".json", ".yaml") and not path.is_symlink()
        act = change_value if is_text and chance.random() < 0.6 else chance.choice(RAW)
        try:
            act(path, chance)
        except (ValueError, RecursionError, yaml.YAMLError, IndexError):  # already no text, or nothing in it
            replace(path, chance)
        done.append(f"{act.__name__} {path.relative_to(folder)}")
    return ", ".join(done)
