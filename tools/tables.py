"""Write what follows from the registered mechanisms: tables, navigation, and lists of names.

    make tables                      # write the files
    python tools/tables.py --check   # name those that are not what they should be; exit code 1

These are the tables of README.md and docs/mechanisms/index.md, the pages of the mechanisms in mkdocs.yml, the
layers of docs/api/attention.md, the names that ``kernel_attention`` and ``kernel_attention.functional``
re-export, and the picture of docs/architecture.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import architecture
from generated import ROOT, between_marks, settle, table

from kernel_attention import mechanisms
from kernel_attention.core.layer import AttentionLayer
from kernel_attention.mechanisms import Mechanism, list_attention

PACKAGE = Path("src") / "kernel_attention"

_SUPERSCRIPTS = str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹")


def generated_texts(root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file that has something to generate, by its path below ``root``."""
    rows = list_attention()
    pages = {row.name: page_of(row.name, root) for row in rows}
    regions = {
        Path("README.md"): ("mechanisms", ["", *readme_table(rows), ""]),
        Path("docs/mechanisms/index.md"): ("mechanisms", ["", *index_table(rows, pages, root), ""]),
        Path("mkdocs.yml"): ("mechanisms", navigation(pages.values())),
        Path("docs/api/attention.md"): ("layers", layer_directives(rows)),
    }
    texts = {
        path: between_marks((root / path).read_text(encoding="utf-8"), mark, lines)
        for path, (mark, lines) in regions.items()
    }
    layers, functions = family_exports()
    for path, exports in ((PACKAGE / "__init__.py", layers), (PACKAGE / "functional.py", functions)):
        texts[path] = with_exports((root / path).read_text(encoding="utf-8"), exports, root / path)
    return {**texts, architecture.FIGURE: architecture.picture(root)}


# --- tables -------------------------------------------------------------------------------------------------


def readme_table(rows: Sequence[Mechanism]) -> list[str]:
    """The columns that matter to whoever chooses a mechanism."""
    return table(
        ("name", "what it computes", "time per head", "causal", "cross-attention", "source"),
        [
            (
                f"`{row.name}`",
                row.summary or f"`{row.equation}`",
                mathematics(row.time),
                yes(row.causal),
                yes(row.cross),
                row.paper,
            )
            for row in rows
        ],
    )


def index_table(rows: Sequence[Mechanism], pages: dict[str, str], root: Path) -> list[str]:
    """What a mechanism supports, with links to the pages."""
    return table(
        ("name", "page", "time per head", "causal", "decoding", "cross", "mixes tokens"),
        [
            (
                f"`{row.name}`",
                f"[{title_of(root, pages[row.name])}]({pages[row.name]})",
                mathematics(row.time),
                yes(row.causal),
                row.decoding,
                yes(row.cross),
                row.mixes_tokens,
            )
            for row in rows
        ],
    )


def mathematics(cost: str) -> str:
    """N^2 p -> N² p; an exponent that is no number stays."""
    return re.sub(r"\^(\d+)", lambda power: power[1].translate(_SUPERSCRIPTS), cost)


def yes(supported: bool) -> str:
    """A cell of a column that asks."""
    return "yes" if supported else "no"


# --- pages --------------------------------------------------------------------------------------------------


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


def navigation(pages: Iterable[str]) -> list[str]:
    """Entries of mkdocs.yml, each page once; their titles are the pages' own."""
    return [f"      - mechanisms/{page}" for page in dict.fromkeys(page.partition("#")[0] for page in pages)]


def layer_directives(rows: Sequence[Mechanism]) -> list[str]:
    """An entry of the API for every layer class."""
    lines: list[str] = []
    for layer in dict.fromkeys(row.layer for row in rows):
        lines += ["", f"::: {layer.__module__.rpartition('.')[0]}.{layer.__qualname__}"]
    return [*lines, ""]


# --- names that are re-exported -----------------------------------------------------------------------------


def family_exports() -> tuple[dict[str, str], dict[str, str]]:
    """{name: module} of the layer classes in the families' ``__all__``, and of everything else there."""
    layers: dict[str, str] = {}
    functions: dict[str, str] = {}
    for family in pkgutil.iter_modules(mechanisms.__path__):
        module = importlib.import_module(f"{mechanisms.__name__}.{family.name}")
        for name in module.__all__:
            found = getattr(module, name)
            is_layer = inspect.isclass(found) and issubclass(found, AttentionLayer)
            (layers if is_layer else functions)[name] = module.__name__
    return layers, functions


def with_exports(text: str, exports: dict[str, str], path: Path) -> str:
    """The module with these names too: imported, in ``__all__`` and, where it is lazy, in ``_HOMES``."""
    present = set(literal(text, "__all__"))
    for name in sorted(exports.keys() - present):
        module = exports[name]
        statement = f"from {module} import {name}\n"
        if "_HOMES = {" in text:
            home = module.removeprefix("kernel_attention.")
            text = text.replace("if TYPE_CHECKING:\n", f"if TYPE_CHECKING:\n    {statement}", 1)
            text = text.replace("_HOMES = {\n", f'_HOMES = {{\n    "{name}": "{home}",\n', 1)
        else:
            text = text.replace("from kernel_attention.", f"{statement}from kernel_attention.", 1)
        text = text.replace("__all__ = [\n", f'__all__ = [\n    "{name}",\n', 1)
    return text if exports.keys() <= present else in_order(text, path)


def literal(text: str, name: str) -> list[str]:
    """The value of a module's list or dictionary of strings."""
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise SystemExit(f"no {name} in the module")


def in_order(text: str, path: Path) -> str:
    """The module with its imports and ``__all__`` sorted and laid out."""
    for command in (["check", "--select", "I,RUF022", "--fix", "--quiet"], ["format", "--quiet"]):
        text = subprocess.run(
            [sys.executable, "-m", "ruff", *command, "--stdin-filename", str(path), "-"],
            input=text, capture_output=True, text=True, check=True, cwd=path.parent,
        ).stdout  # fmt: skip
    return text


def main(arguments: Sequence[str]) -> int:
    """Write the files, or check them; the exit code."""
    return settle(generated_texts(), arguments, "not what the mechanisms say (make tables)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
