"""What the documentation says is true: its Python runs, its commands, targets, recipes and links exist."""

import json
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from checkout import ROOT
from forked import Forks

from kernel_attention_lab.runs import list_recipes

README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r'^```python title="([\w.]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
_SHELL_LINE = re.compile(r"^ {4}(kernel-attention|python) +(.+)$", re.MULTILINE)
_COMMAND = re.compile(r"(?:^ {4}|`)kernel-attention +([a-z]+)", re.MULTILINE)
_RECIPE = re.compile(r"kernel-attention +train +([a-z][\w/]*)(?![\w/.])")
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
            # The battery of a new mechanism runs in lab/tests/test_new_mechanism.py too.
            marks = [pytest.mark.slow] if "check_attention(" in match[1] else []
            blocks.append(pytest.param(match[1], page, line, id=f"{name_of(page)}:{line}", marks=marks))
    return blocks


def found(pattern: re.Pattern) -> list[str]:
    """What the pattern captures on all pages, each once."""
    return sorted({match for page in PAGES for match in pattern.findall(page.read_text(encoding="utf-8"))})


def run_command(monkeypatch, *arguments: str) -> int:
    """Exit code of the console command, in this process."""
    from kernel_attention_lab.cli import main

    monkeypatch.setattr(sys, "argv", ["kernel-attention", *arguments])
    try:
        return main() or 0
    except SystemExit as stop:
        return stop.code or 0


def save_files(page: Path, folder: Path) -> list[str]:
    """Write the files that a page has the reader save; their names."""
    files = dict(_FILE.findall(page.read_text(encoding="utf-8")))
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    return list(files)


def run_program(forks: Forks, folder: Path, *words: str) -> str:
    """What a program of Python prints that ends without an error; what it registers stays in its process."""
    result = forks.run(*words, cwd=folder)
    assert result.returncode == 0, f"{words}\n{result.stderr}"
    return result.stdout


def follow(page: Path, python: Callable[..., str], command: Callable[..., str]) -> list[tuple[str, str]]:
    """Run the commands of a page in their order, with the page's files; (words, what was printed) of each."""
    printed = []
    for program, words in _SHELL_LINE.findall(page.read_text(encoding="utf-8")):
        run = command if program == "kernel-attention" else python
        printed.append((words, run(*shlex.split(words))))
    return printed


@pytest.mark.parametrize(("source", "page", "line"), python_blocks())
def test_python_block_runs(source, page, line, tmp_path, monkeypatch, forks):
    """Every block stands alone: it runs as a reader would paste it, with the files of its page alone."""
    if any(f"import {Path(name).stem}" in source or f"from {Path(name).stem}" in source
           for name in save_files(page, tmp_path)):  # fmt: skip
        run_program(forks, tmp_path, "-W", "error", "-c", source)
        return
    monkeypatch.chdir(tmp_path)
    code = compile(
        "\n" * (line - 1) + source, str(page), "exec"
    )  # tracebacks show the page's own line numbers
    exec(code, {"__name__": "__main__"})


@pytest.mark.slow
def test_your_own_mechanism_is_listed_trained_evaluated_analyzed_and_benched(tmp_path, forks):
    """The commands of the page, in their order, with the page's file."""
    page = ROOT / "docs" / "your-own-mechanism.md"
    assert save_files(page, tmp_path) == ["laplace.py", "my_mechanism.py"]
    # As the installed command, without the working folder on the path.
    command = partial(run_program, forks, tmp_path, "-P", "-m", "kernel_attention_lab")
    printed = {
        words.split()[0]: text for words, text in follow(page, partial(run_program, forks, tmp_path), command)
    }
    assert list(printed) == ["list", "train", "evaluate", "analyze", "bench"]
    assert re.search(r"gaussian +│ Nadaraya 1964", printed["list"])
    run = tmp_path / "runs" / "gaussian"
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    assert (config["attention"], config["plugins"]) == ("gaussian", ["my_mechanism"])
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["mean"] > 0.5, "of nine classes, after a few epochs"
    assert f"{100 * summary['mean']:.2f} %" in printed["evaluate"]
    diagnosed = json.loads((run / "seed-0" / "diagnostics.json").read_text(encoding="utf-8"))["layers"]
    assert [layer["mechanism"] for layer in diagnosed] == ["gaussian", "gaussian"]
    assert all(layer["summary"]["effective_rank"] > 1 for layer in diagnosed)
    (cell,) = json.loads((tmp_path / "runs/bench/benchmark.json").read_text(encoding="utf-8"))["cells"]
    assert [row["contender"] for row in cell["rows"]] == ["sdpa", "gaussian"]
    assert all("failed" not in row for row in cell["rows"])

    refused = forks.run("-P", "-m", "kernel_attention_lab", "evaluate", "runs/gaussian", cwd=tmp_path)
    assert refused.returncode == 2
    assert "this run needs the plugin 'my_mechanism'" in refused.stderr
    assert "--plugin my_mechanism" in refused.stderr


@pytest.mark.slow  # cli/test_own_data.py and cli/test_image_files.py run the same commands on less
def test_your_own_series_and_images_are_trained_predicted_and_analyzed(
    tmp_path, monkeypatch, capsys, forks, undrawn
):
    """The commands of the page, in their order, with the files that its scripts write."""
    monkeypatch.chdir(tmp_path)

    def command(*words: str) -> str:
        code = run_command(monkeypatch, *words)
        said = capsys.readouterr()
        assert code == 0, f"{words}\n{said.err}"
        return said.out

    page = ROOT / "docs" / "your-own-data.md"
    assert save_files(page, tmp_path) == ["make_series.py", "make_images.py"]
    printed = follow(page, partial(run_program, forks, tmp_path), command)
    assert [words.split()[0] for words, _ in printed] == [
        *("make_series.py", "init", "train", "predict", "analyze"),
        *("make_images.py", "train", "predict", "evaluate"),
    ]
    series, image = (text.splitlines() for words, text in printed if words.startswith("predict"))
    assert series[0] == "case,prediction,probability_early,probability_late"
    assert len(series) == 1 + 4
    assert image[0] == "file,prediction,probability_columns,probability_rows"
    for run in ("bursts", "photos"):
        summary = json.loads((tmp_path / "runs" / run / "summary.json").read_text(encoding="utf-8"))
        assert summary["mean"] > 0.75, "of two classes, 40 cases: three deviations above guessing"
    assert '<figure class="viewer"' in (tmp_path / "runs/bursts/report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("command", found(_COMMAND))
def test_command_exists(command, monkeypatch, capsys):
    assert run_command(monkeypatch, command, "--help") == 0
    assert command in capsys.readouterr().out


def test_recipes_and_targets_exist():
    assert set(found(_RECIPE)) <= set(list_recipes())
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert set(found(_TARGET)) <= set(targets)


def test_relative_links_lead_somewhere():
    for page in PAGES:
        for target in _LINK.findall(page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{name_of(page)} links to {target}"


def test_every_mechanism_is_in_readme_and_table_and_has_a_page():
    """And they name no mechanism that does not exist."""
    import kernel_attention as ka

    names = {mechanism.name for mechanism in ka.list_attention()}
    index = ROOT / "docs" / "mechanisms" / "index.md"
    assert set(re.findall(r"\[`(\w+)`\]\(docs/mechanisms/", README.read_text(encoding="utf-8"))) == names
    assert set(re.findall(r"^\| `(\w+)` \|", index.read_text(encoding="utf-8"), re.MULTILINE)) == names
    pages = [page.read_text(encoding="utf-8") for page in index.parent.glob("*.md") if page != index]
    assert all(any(f"`{name}`" in page or f'"{name}"' in page for page in pages) for name in names)
