"""A public name of the package means one thing."""

import ast
from collections import defaultdict
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "kernel_attention"
SAME_MEANING = {
    "cosine": "the kernel, and the feature map that makes it",
    "map_tokens": "the two engines of one operator",
    "pull_back": "the two engines of one operator",
}


def test_no_two_public_functions_or_classes_share_a_name():
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(str(path.relative_to(SOURCE)))
    shared = {name: where for name, where in homes.items() if len(where) > 1}
    assert {name: where for name, where in shared.items() if name not in SAME_MEANING} == {}
    assert set(SAME_MEANING) == set(shared)  # no entry outlives its reason
