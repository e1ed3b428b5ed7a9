"""What the documentation says is true: its Python runs, its commands, targets, recipes and links exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^ {4}|`)kernel-attention +([a-z]+)", re.MULTILINE)
_RECIPE = re.compile(r"kernel-attention +train +([a-z][\w/]*)")
_TARGET = re.compile(r"(?:^ {4}|`)make +([a-z][a-z-]*)", re.MULTILINE)
_LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def python_blocks() -> list:
    blocks = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in _FENCE.finditer(text):
            line = text.count("\n", 0, match.start(1)) + 1
            blocks.append(pytest.param(match[1], page, line, id=f"{name_of(page)}:{line}"))
    return blocks


def found(pattern: re.Pattern) -> list[str]:
    """What the pattern captures on all pages, each once."""
    return sorted({match for page in PAGES for match in pattern.findall(page.read_text(encoding="utf-8"))})


def run_command(monkeypatch, *arguments: str) -> int:
    """Exit code of the console command, in this process."""
    from kernel_attention.experiments.cli import main

    monkeypatch.setattr(sys, "argv", ["kernel-attention", *arguments])
    try:
        return main() or 0
    except SystemExit as stop:
        return stop.code or 0


@pytest.mark.parametrize(("source", "page", "line"), python_blocks())
def test_python_block_runs(source, page, line, tmp_path, monkeypatch):
    """Every block stands alone: it runs as a reader would paste it, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    code = compile(
        "\n" * (line - 1) + source, str(page), "exec"
    )  # tracebacks show the page's own line numbers
    exec(code, {"__name__": "__main__"})


def test_the_first_python_block_of_the_readme_is_short():
    first = _FENCE.search(README.read_text(encoding="utf-8"))[1]
    assert len([line for line in first.splitlines() if line.strip()]) <= 8


@pytest.mark.parametrize("command", found(_COMMAND))
def test_command_exists(command, monkeypatch, capsys):
    assert run_command(monkeypatch, command, "--help") == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize("recipe", found(_RECIPE))
def test_recipe_exists(recipe):
    assert (ROOT / "recipes" / f"{recipe}.yaml").is_file()


@pytest.mark.parametrize("target", found(_TARGET))
def test_make_target_exists(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_relative_links_lead_somewhere(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_every_mechanism_is_in_both_tables_and_has_a_page():
    """And the tables name no mechanism that does not exist."""
    import kernel_attention as ka

    names = {mechanism.name for mechanism in ka.list_attention()}
    index = ROOT / "docs" / "mechanisms" / "index.md"
    for table in (README, index):
        assert set(re.findall(r"^\| `(\w+)` \|", table.read_text(encoding="utf-8"), re.MULTILINE)) == names
    pages = [page.read_text(encoding="utf-8") for page in index.parent.glob("*.md") if page != index]
    assert all(any(f"`{name}`" in page or f'"{name}"' in page for page in pages) for name in names)
