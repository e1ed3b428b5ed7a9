"""A run keeps where its data lie; whoever says otherwise is believed, and remembered by a resumed run."""

from __future__ import annotations

import json
import shlex
import shutil
import sys

import pytest
from runs.small_runs import make_waves, train_small, write_recipe

from kernel_attention_lab.cli import main
from kernel_attention_lab.runs import run
from kernel_attention_lab.runs.saved import load_run

pytestmark = pytest.mark.usefixtures("brief")


def versions(folder):
    return json.loads((folder / "versions.json").read_text())


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """An empty working folder, and no data root in the environment."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("KERNEL_ATTENTION_DATA", raising=False)
    return folder


def test_every_command_finds_the_data_again(trained, waves, tmp_path, elsewhere, undrawn):
    folder = shutil.copytree(trained, tmp_path / "run")
    assert versions(folder)["data_root"] == str(waves.resolve())
    assert main(["evaluate", str(folder)]) == 0
    assert main(["analyze", str(folder), "--cases", "2", "--layers", "0"]) == 0
    (folder / "seed-1" / "evaluation.json").unlink()
    assert main(["train", "--resume", str(folder), "--progress", "false"]) == 0


def test_a_data_root_from_the_environment_or_a_relative_one_is_kept_too(
    waves, tmp_path, elsewhere, monkeypatch
):
    monkeypatch.setenv("KERNEL_ATTENTION_DATA", str(waves))
    recipe = tmp_path / "recipe.yaml"
    write_recipe(recipe, epochs=1)
    assert main(["train", str(recipe), "--output", str(tmp_path / "run"), "--progress", "false"]) == 0
    monkeypatch.delenv("KERNEL_ATTENTION_DATA")
    (elsewhere / "here").symlink_to(waves)
    relative = ["--output", str(tmp_path / "relative"), "--data-root", "here", "--progress", "false"]
    assert main(["train", str(recipe), *relative]) == 0
    monkeypatch.chdir(tmp_path)
    for name in ("run", "relative"):
        assert versions(tmp_path / name)["data_root"] == str(waves.resolve())
        assert main(["evaluate", str(tmp_path / name)]) == 0


def test_data_that_moved(tmp_path, elsewhere, capsys):
    first = make_waves(tmp_path / "first")
    folder = train_small(tmp_path / "run", first, epochs=1)
    moved = first.rename(tmp_path / "second")
    assert main(["evaluate", str(folder)]) == 2
    assert "unknown dataset 'Waves'" in capsys.readouterr().err
    assert main(["evaluate", str(folder), "--data-root", str(moved)]) == 0
    assert versions(folder)["data_root"] == str(first), "measuring changes nothing in the run"
    assert main(["train", "--resume", str(folder), "--data-root", str(moved), "--progress", "false"]) == 0
    assert versions(folder)["data_root"] == str(moved)
    assert main(["evaluate", str(folder)]) == 0


def test_another_data_root_goes_before_the_kept_one(trained, tmp_path, elsewhere, capsys):
    other = make_waves(tmp_path / "other")
    path = other / "Waves/Waves_TRAIN.ts"
    path.write_text(path.read_text().rstrip().rpartition("\n")[0] + "\n")
    assert main(["evaluate", str(trained), "--data-root", str(other)]) == 2
    assert "train_cases is 23, in the data of the run it was 24" in capsys.readouterr().err


def test_runs_of_earlier_versions_have_none(trained, waves, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "run")
    kept = versions(folder)
    del kept["data_root"]
    (folder / "versions.json").write_text(json.dumps(kept))
    assert list(load_run(folder).evaluate(data_root=waves))


@pytest.mark.parametrize(
    "program", ["/opt/my env/bin/kernel-attention", "/opt/site-packages/kernel_attention/__main__.py"]
)
def test_the_command_of_a_run_can_be_pasted(program, waves, tmp_path, monkeypatch):
    words = ["train", "my recipe.yaml", "--attention", '{"primal": {"rank": 3}}', "--output", "it's here"]
    monkeypatch.setattr(sys, "argv", [program, *words])
    folder = train_small(tmp_path / "run", waves, epochs=1)
    assert shlex.split(versions(folder)["command"]) == ["kernel-attention", *words]
    assert run._command(["my script.py", "a b"]) == "'my script.py' 'a b'"
