"""The page of models that can be replaced says what ``replace_attention`` does."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the checkout")
PAGE = ROOT / "docs" / "replaced-hosts.md"
# Of every library and outcome.
SAMPLE = {
    "mvitv2_tiny", "test_vit", "test_vit_relpos", "DebertaModel", "GPT2Model", "GitModel", "YosoModel",
    "SqueezeBertModel",
}  # fmt: skip


@pytest.fixture(scope="module")
def tool():
    """``tools/replaced_hosts.py``."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        yield importlib.import_module("replaced_hosts")
    finally:
        sys.path.remove(str(ROOT / "tools"))


def test_the_page_is_right_about_some_models(tool, timm, transformers):
    """What is tried again is on the page, word for word, and nothing more is on it about these models."""
    page = PAGE.read_text(encoding="utf-8").splitlines()
    listed = sorted(row for row in page if any(f"| `{name}` |" in row for name in SAMPLE))
    found = list(tool.rows(lambda example: example.name in SAMPLE))
    assert sorted(tool.markdown((), map(tool.line, found))[2:]) == listed
    assert {row.outcome for row in found} == {"exact", "reported", "refused"}
    assert {row.model for row in found} == SAMPLE - {"SqueezeBertModel"}, "one that has no attention of ours"


def test_nothing_on_the_page_is_wrong():
    page = PAGE.read_text(encoding="utf-8")
    assert "## Wrong" not in page
    assert page.count("\n| transformers |") > 300
    assert page.count("\n| timm |") > 20


@pytest.mark.slow
def test_the_whole_page_is_what_the_tool_writes(tool, timm, transformers):
    assert tool.main(["--check"]) == 0
