"""Write what follows from the registered mechanisms: tables, navigation, and lists of names.

    make tables                      # write the files
    python tools/tables.py --check   # name those that are not what they should be; exit code 1

These are the regions of pages whose source in docs/tables is ``mechanisms``, the pages of the mechanisms in
mkdocs.yml, the names that ``kernel_attention`` and ``kernel_attention.functional`` re-export, and the picture
of docs/architecture.md.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import architecture

from kernel_attention import mechanisms
from kernel_attention.core.layer import AttentionLayer
from kernel_attention_lab.evidence import pages
from kernel_attention_lab.evidence.pages import between_marks, settle
from kernel_attention_lab.evidence.registry import mechanism_observations

ROOT = Path(__file__).parents[1]
PACKAGE = Path("src") / "kernel_attention"


def generated_texts(root: Path = ROOT) -> dict[Path, str]:
    """The new text of every file that has something to generate, by its path below the root."""
    texts = pages.generated_texts(root, "mechanisms")
    site = Path("mkdocs.yml")
    texts[site] = between_marks((root / site).read_text(encoding="utf-8"), "mechanisms", navigation(root))
    layers, functions = family_exports()
    for path, exports in ((PACKAGE / "__init__.py", layers), (PACKAGE / "functional.py", functions)):
        texts[path] = with_exports((root / path).read_text(encoding="utf-8"), exports, root / path)
    return {**texts, architecture.FIGURE: architecture.picture(root)}


def navigation(root: Path) -> list[str]:
    """Entries of mkdocs.yml, each page once; their titles are the pages' own."""
    files = dict.fromkeys(row["page"].partition("#")[0] for row in mechanism_observations(root))
    return [f"      - mechanisms/{page}" for page in files]


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
    return settle(ROOT, generated_texts(), arguments, "not what the mechanisms say (make tables)")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
