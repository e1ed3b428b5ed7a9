"""The examples of three pages that need timm, transformers or peft; tests/test_readme.py runs the others."""

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
if not DOCS.is_dir():
    pytest.skip("needs the pages of the checkout", allow_module_level=True)
BLOCKS = [
    source
    for page in ("replacing.md", "converting.md", "hugging-face.md")
    for source in re.findall(
        r"^```py\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    if "FOLDER" not in source  # a trained run: lab/tests
]


@pytest.mark.parametrize(
    "source", BLOCKS, ids=lambda source: re.search(r"create_model\W+\w+|Bert|ForCausalLM|peft", source)[0]
)
def test_example_runs(source, request):
    request.getfixturevalue("timm" if "timm" in source else "transformers")
    if "peft" in source:
        pytest.importorskip("peft", reason="peft is not installed")
    exec(compile(source, str(DOCS), "exec"), {"__name__": "__main__"})
