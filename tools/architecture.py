"""The picture of docs/architecture.md, drawn from the import contract of pyproject.toml.

Rooms are the modules of the first contract, top to bottom. What they are for stands in the headings of the
page. What a family is built on stands in the contract of the mechanisms. ``make tables`` writes the picture.
"""

from __future__ import annotations

import re
import textwrap
import tomllib
from html import escape
from pathlib import Path

FIGURE = Path("docs/figures/architecture.svg")
PAGE = Path("docs/architecture.md")
PACKAGE = Path("src/kernel_attention")
LABORATORY = "kernel_attention_lab"

_HEADING = re.compile(r"^## `(\w+)`: (.+)$", re.MULTILINE)
_WIDTH, _ROW, _GAP, _LINE = 900, 46, 8, 20  # pixels
_CHARACTERS = 115  # of a line across the picture, in the widest of the usual fonts


def layers(root: Path) -> list[list[str]]:
    """The laboratory, then the rooms of the library, a list for every layer, the highest first."""
    library = [[room.strip() for room in layer.split("|")] for layer in _contract(root, "Arrows")["layers"]]
    return [[LABORATORY], *library]


def purposes(root: Path) -> dict[str, str]:
    """{room: what it is for}, in the order of the page."""
    headings = _HEADING.findall((root / PAGE).read_text(encoding="utf-8"))
    return {room: purpose.replace("`", "") for room, purpose in headings}


def details(root: Path) -> dict[str, list[str]]:
    """Lines below the name of a room: what it consists of."""
    inside = [layer.replace(" | ", ", ") for layer in _contract(root, "The laboratory")["layers"]]
    families = sorted(path.parent.name for path in (root / PACKAGE / "mechanisms").glob("*/__init__.py"))
    built_on: dict[str, list[str]] = {}
    for entry in _contract(root, "Families")["ignore_imports"]:
        above, below = re.findall(r"mechanisms\.(\w+)", entry)
        built_on.setdefault(above, []).append(below)
    return {
        LABORATORY: textwrap.wrap(" › ".join(inside), _CHARACTERS),
        "mechanisms": [
            ", ".join(family for family in families if family not in built_on),
            *(f"{above}, built on {', '.join(sorted(below))}" for above, below in sorted(built_on.items())),
        ],
    }


def picture(root: Path) -> str:
    """The drawing as SVG."""
    purpose, detail = purposes(root), details(root)
    parts, top = [], 30
    for layer in layers(root):
        height = _ROW + _LINE * max(len(detail.get(room, ())) for room in layer)
        width = (_WIDTH - _GAP * (len(layer) - 1)) / len(layer)
        for column, room in enumerate(layer):
            left = column * (width + _GAP)
            folder = "" if (root / PACKAGE / f"{room}.py").is_file() else "/"
            parts.append(
                f'<rect x="{left:.0f}" y="{top}" width="{width:.0f}" height="{height}" rx="5" fill="#e8eaf6" '
                'stroke="#3f51b5"/>'
            )
            parts.append(_text(left + 12, top + 19, room + folder, 'font-weight="bold"'))
            lines = [purpose[room], *detail.get(room, ())]
            parts += [_text(left + 12, top + 37 + _LINE * n, line) for n, line in enumerate(lines)]
        top += height + _GAP
    caption = _text(0, 18, "A room may import the rooms below it, and none beside it or above.")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH + 16}" height="{top + 4}" '
            f'viewBox="-8 -2 {_WIDTH + 16} {top + 4}" font-family="sans-serif" font-size="13">',
            f'<rect x="-8" y="-2" width="{_WIDTH + 16}" height="{top + 4}" fill="#ffffff"/>',
            caption,
            *parts,
            "</svg>",
            "",
        ]
    )


def _contract(root: Path, name: str) -> dict:
    settings = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return next(contract for contract in settings["contracts"] if contract["name"].startswith(name))


def _text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="#1a1a1a" {more}>{escape(words)}</text>'.replace(" >", ">")
