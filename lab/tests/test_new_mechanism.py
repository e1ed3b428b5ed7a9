"""A new mechanism is the files that CONTRIBUTING lists and one command: everything else follows."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from dummy_mechanism import FILES
from forked import Forks

ROOT = Path(__file__).parents[2]
GENERATED = {
    "README.md",
    "docs/api/attention.md",
    "docs/figures/architecture.svg",
    "docs/mechanisms/index.md",
    "mkdocs.yml",
    "src/kernel_attention/__init__.py",
    "src/kernel_attention/functional.py",
}
USE = """
import torch
import kernel_attention as ka
from kernel_attention_lab.benchmarking import plan_from_options, run_benchmark
from kernel_attention_lab.cli import main
from kernel_attention_lab.tasks import make_recipe

assert main(["list", "attention"]) == 0
model = ka.models.SequenceClassifier(
    in_features=3, num_outputs=2, max_len=9, embed_dim=8, num_heads=2, num_layers=1, feedforward_dim=8,
    attention="mine",
)
(layer,) = ka.analysis.diagnose(model, torch.randn(4, 9, 3)).layers
print("diagnosed", layer.mechanism)
recipe = make_recipe({"dataset": "JapaneseVowels", "attention": {"mine": {"bias": False}}})
print("recipe", recipe.attention_name())
sizes = {"length": [8], "embed_dim": [8], "rounds": 1, "memory": False, "flops": True}
(cell,) = run_benchmark(plan_from_options(None, ["mine"], sizes, False), warmup=0)["cells"]
print("benched", [row["contender"] for row in cell["rows"] if row["time"]])
"""


def files_of(folder: Path) -> dict[str, str]:
    """The text files of a checkout by path."""
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for part in ("src", "lab", "tests", "docs", "tools")
        for path in (folder / part).rglob("*")
        if path.suffix in {".py", ".md", ".yaml", ".svg"} and path.is_file()
    } | {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir() if path.is_file()}


def run(forks: Forks, folder: Path, *arguments: str) -> str:
    """Python in the checkout ``folder``; what it prints."""
    path = os.pathsep.join(str(folder / place) for place in ("src", "lab/src"))
    result = forks.run(*arguments, cwd=folder, env={"PYTHONPATH": path, "COLUMNS": "300"})
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    return result.stdout


@pytest.fixture(scope="module")
def checkout(tmp_path_factory, forks) -> Path:
    """A copy of this checkout with the dummy's files, and what the command writes."""
    folder = tmp_path_factory.mktemp("new") / "checkout"
    folder.mkdir()
    for part in ("src", "lab", "tests", "docs", "tools"):
        shutil.copytree(ROOT / part, folder / part)  # with the bytecode, which need not be made again
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    for path, text in FILES.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text.lstrip("\n"), encoding="utf-8")
    run(forks, folder, "tools/tables.py")
    return folder


def test_contributing_lists_the_files_of_a_new_mechanism():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    section = text.partition("## Adding a mechanism")[2].partition("\n## ")[0]
    required = section.partition("### When there is more")[0]
    assert set(re.findall(r"`([\w/.]*\bmine[\w/.]*\.(?:py|md))`", required)) == set(FILES)
    assert "make tables" in required


def test_nothing_else_is_edited(checkout):
    before, after = files_of(ROOT), files_of(checkout)
    assert {path for path in after if after[path] != before.get(path)} == set(FILES) | GENERATED
    for path in sorted(GENERATED):
        added = [line for line in after[path].splitlines() if line not in before[path].splitlines()]
        assert added
        assert all(re.search("mine|Mean|mean_attention", line) for line in added), f"{path}: {added}"


def test_the_checkout_with_it_is_clean(checkout, forks):
    python = [path for path in (*FILES, *GENERATED) if path.endswith(".py")]
    run(forks, checkout, "-m", "ruff", "check", "--no-cache", *python)
    run(forks, checkout, "-m", "ruff", "format", "--no-cache", "--check", *python)
    lint = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    assert "0 broken" in run(forks, checkout, "-c", lint)


@pytest.mark.slow
def test_the_battery_and_the_documentation_cover_it(checkout, forks):
    printed = run(
        forks, checkout, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", "-k",
        "mine or tables or every_mechanism",
        "tests/contracts", "tests/core", "tests/mechanisms/mine", "lab/tests/test_readme.py",
        "lab/tests/test_documentation.py",
    )  # fmt: skip
    assert int(re.search(r"(\d+) passed", printed)[1]) > 40


def test_it_is_listed_diagnosed_benched_and_in_recipes(checkout, forks):
    printed = run(forks, checkout, "-c", USE)
    assert re.search(r"│ mine +│ none +│ mean\(v\)", printed)
    assert "diagnosed mine\n" in printed
    assert "recipe mine" in printed
    assert "benched ['sdpa', 'mine']" in printed
    readme = (checkout / "README.md").read_text(encoding="utf-8")
    assert "[`mine`](docs/mechanisms/mine.md)" in readme
    index = (checkout / "docs" / "mechanisms" / "index.md").read_text(encoding="utf-8")
    assert "| `mine` | [Mean attention](mine.md) | N p | yes | no | no | yes |" in index
