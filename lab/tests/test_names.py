"""A public name of the package means one thing."""

import ast
import importlib
from collections import defaultdict

from checkout import PACKAGES, ROOT

SAME_MEANING = {
    "cosine": "the kernel, and the feature map that makes it",
    "pull_back": "the engines of one operator",
}


def test_no_two_public_functions_or_classes_share_a_name():
    homes: dict[str, list[str]] = defaultdict(list)
    for folder in PACKAGES.values():
        for path in sorted(folder.rglob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                    homes[node.name].append(str(path.relative_to(folder)))
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in SAME_MEANING} == {}
    assert set(SAME_MEANING) == set(shared)  # no entry outlives its reason


def test_every_name_that_a_room_promises_is_there():
    """Names that are imported when first asked for, above all."""
    rooms = [
        path.parent.relative_to(folder.parent)
        for folder in PACKAGES.values()
        for path in folder.rglob("__init__.py")
    ]
    for room in (importlib.import_module(".".join(path.parts)) for path in sorted(rooms)):
        missing = [name for name in getattr(room, "__all__", ()) if not hasattr(room, name)]
        assert missing == [], room.__name__


def test_every_name_that_a_script_imports_is_there():
    """Scripts that no test runs, above all."""
    for path in (
        path for folder in ("benchmarks", "examples", "tools") for path in (ROOT / folder).rglob("*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] not in PACKAGES:
                continue
            room = importlib.import_module(node.module)
            for name in (alias.name for alias in node.names if not hasattr(room, alias.name)):
                importlib.import_module(f"{node.module}.{name}")
