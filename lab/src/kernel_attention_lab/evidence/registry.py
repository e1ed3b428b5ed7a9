"""The registered mechanisms as observations, each with its page of the documentation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kernel_attention.mechanisms import list_attention


def mechanism_observations(root: Path) -> Iterator[dict[str, Any]]:
    """Every ``mechanism``, its ``page`` below docs/mechanisms with its ``title``, its layer's ``path``."""
    for mechanism in list_attention():
        page, layer = page_of(mechanism.name, root), mechanism.layer
        path = f"{layer.__module__.rpartition('.')[0]}.{layer.__qualname__}"
        yield {"mechanism": mechanism, "page": page, "title": title_of(root, page), "path": path}


def page_of(name: str, root: Path) -> str:
    """The page of a mechanism below docs/mechanisms, with the heading's anchor where it is a section.

    In this order: the page named like the mechanism, the page with a section of that name, the page that has
    the name in its opening.
    """
    folder = root / "docs" / "mechanisms"
    if (folder / f"{name.replace('_', '-')}.md").is_file():
        return f"{name.replace('_', '-')}.md"
    pages = [page for page in sorted(folder.glob("*.md")) if page.name != "index.md"]
    for page in pages:
        headings = re.findall(r"^## +(.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
        if name in (heading.strip("`").lower() for heading in headings):
            return f"{page.name}#{name}"
    for page in pages:
        opening = page.read_text(encoding="utf-8").partition("\n## ")[0]
        if f"`{name}`" in opening:
            return page.name
    raise SystemExit(f"docs/mechanisms: no page describes {name!r}; expected {name.replace('_', '-')}.md")


def title_of(root: Path, page: str) -> str:
    """The page's first heading."""
    text = (root / "docs" / "mechanisms" / page.partition("#")[0]).read_text(encoding="utf-8")
    return text.removeprefix("# ").partition("\n")[0]
