"""The examples of docs/replacing.md that need timm or transformers; tests/test_readme.py runs the others."""

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "replacing.md"
BLOCKS = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(
    "source", BLOCKS, ids=lambda source: re.search(r"create_model\W+\w+|Bert", source)[0]
)
def test_example_runs(source, request):
    request.getfixturevalue("timm" if "timm" in source else "transformers")
    exec(compile(source, str(PAGE), "exec"), {"__name__": "__main__"})
