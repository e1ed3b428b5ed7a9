"""``--plugin``: a mechanism of another package, trained, recorded, opened again, benched."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys

import pytest
import yaml
from runs.small_runs import SRC, write_recipe

PLUGIN = '''
"""A mechanism in a file of its own."""

from torch import nn

import kernel_attention as ka


@ka.register_attention("plain_mean", paper="nobody", equation="mean(x)", time="N p", memory="N p")
class MeanAttention(ka.AttentionLayer):
    """Every token gets the mean of all of them."""

    def __init__(self, embed_dim, num_heads):
        super().__init__(embed_dim, num_heads)
        self.out_proj = nn.Linear(embed_dim, embed_dim)

    def why_not_causal(self):
        return "the mean reads the whole sequence"

    def attend(self, x, context, attention_mask, is_causal):
        if attention_mask is None:
            return self.out_proj(x.mean(dim=1, keepdim=True).expand_as(x))
        mask = attention_mask[..., None]
        mean = x.masked_fill(~mask, 0.0).sum(dim=1, keepdim=True) / mask.sum(dim=1, keepdim=True)
        return self.out_proj(mean.expand_as(x))


open("executed", "a").write("x")
'''


@pytest.fixture
def here(here, monkeypatch):
    """A working folder that holds the plugin; the path of this process is left as it was."""
    (here / "our_plugin.py").write_text(PLUGIN)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return here


@pytest.fixture
def command(here, forks):
    """Runs the command in a process of its own, whose mechanisms are not ours; its standard error.

    As the installed command, it does not have the working folder on its path.
    """

    def run(*arguments):
        process = forks.run("-P", "-m", "kernel_attention_lab", *map(str, arguments), cwd=here)
        assert process.returncode == 0, process.stderr
        return process.stderr

    return run


def test_a_plugins_mechanism_trains_and_its_run_says_what_it_needs(command, refused, here, waves):
    options = ("--data-root", waves, "--output", "run", "--progress", "false", "--attention", "plain_mean")
    recipe = write_recipe(here / "recipe.yaml", epochs=1)
    assert "unknown attention mechanism 'plain_mean'" in refused("train", recipe, *options)
    assert command("train", recipe, *options, "--plugin", "our_plugin") == ""
    config = yaml.safe_load((here / "run/config.yaml").read_text())
    assert (config["attention"], config["plugins"]) == ("plain_mean", ["our_plugin"])

    (here / "executed").unlink()
    for words in (
        ["evaluate", "run", "--data-root", waves],
        ["predict", "run", waves / "Waves/Waves_TEST.ts"],
        ["analyze", "run", "--data-root", waves],
        ["train", "--resume", "run", "--data-root", waves],
    ):
        message = refused(*words)
        assert "this run needs the plugin 'our_plugin'; give --plugin our_plugin" in message
    assert not (here / "executed").exists(), "opening a run imports nothing by itself"

    command("--plugin=our_plugin", "evaluate", "run", "--data-root", waves)


def test_a_recipe_is_read_without_importing_the_plugins_that_it_names(cli, here):
    recipe = write_recipe(here / "recipe.yaml", attention="plain_mean", plugins=["our_plugin"])
    assert cli("train", recipe, "--help")[0] == 0
    assert not (here / "executed").exists()


@pytest.mark.slow
def test_bench_knows_a_plugins_mechanism(command, here):
    sizes = ("--length", 16, "--embed-dim", 8, "--rounds", 1, "--threads", 1, "--output", "bench")
    command("--plugin", "our_plugin", "bench", "plain_mean", *sizes)
    (cell,) = json.loads((here / "bench/benchmark.json").read_text())["cells"]
    row = next(row for row in cell["rows"] if row["contender"] == "plain_mean")
    assert row["memory"]["step"] > 0, "measured in a further process, which loads the plugin too"


def test_a_file_here_does_not_stand_in_for_an_installed_package(command, here):
    (here / "yaml.py").write_text("open('executed', 'a')\n")
    (here / "our_plugin.py").write_text("import yaml\nyaml.safe_load\n")
    command("list", "attention", "--plugin", "our_plugin")
    assert not (here / "executed").exists()


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        ("no_such_module", "plugin 'no_such_module' cannot be imported (ModuleNotFoundError: "),
        ("broken_plugin", "plugin 'broken_plugin' cannot be imported (ZeroDivisionError: "),
        ("./our_plugin.py", "plugin './our_plugin.py' cannot be imported"),
        ("", "plugin '' cannot be imported"),
    ],
)
def test_a_plugin_that_cannot_be_imported(plugin, message, refused, here, monkeypatch):
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    (here / "broken_plugin.py").write_text("1 / 0\n")
    said = refused("list", "attention", "--plugin", plugin)
    assert said.startswith(message)
    assert "accepted: the name of a module" in said


def test_names_that_are_no_names(refused, here):
    recipe = write_recipe(here / "recipe.yaml", plugins="our_plugin")
    assert "plugins='our_plugin' must be names" in refused("train", recipe)


def test_the_working_folder_is_searched_for_plugins_alone(cli, here):
    """A run folder may hold files named as packages that are not installed, which commands try to import."""
    (here / "no_such_package.py").write_text("open('executed', 'w')\n")
    (here / "empty_plugin.py").write_text("")
    for plugins in ([], ["--plugin", "empty_plugin"]):
        assert cli("list", "attention", *plugins)[0] == 0
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module("no_such_package")
        assert str(here) not in sys.path
    assert not (here / "executed").exists()


@pytest.mark.parametrize("started", ["spawn", "module"])
def test_processes_of_a_command_execute_nothing_from_the_working_folder(here, started):
    """Python searches it first in processes that multiprocessing starts, and after ``python -m``."""
    for module in ("pickle", "socket", "selectors", "runpy", "torch"):
        (here / f"{module}.py").write_text("open('executed', 'w')\n")
    start = {
        "spawn": "from multiprocessing import get_context\n"
        "    process = get_context('spawn').Process(target=print)\n    process.start()\n    process.join()",
        "module": "import subprocess, sys\n    subprocess.run([sys.executable, '-m', 'site'], check=True)",
    }[started]
    (here.parent / "script.py").write_text(
        "from kernel_attention_lab import cli\n"
        f"def command(options):\n    {start}\n    return 0\n"
        "if __name__ == '__main__':\n"
        "    cli._COMMANDS['list'] = command\n    raise SystemExit(cli.main(['list', 'attention']))\n"
    )
    done = subprocess.run(
        [sys.executable, str(here.parent / "script.py")],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"}, cwd=here, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (here / "executed").exists()


@pytest.mark.usefixtures("brief")
def test_a_sweep_that_goes_on_imports_no_plugins_by_itself(cli, refused, here, waves):
    recipe = write_recipe(here / "recipe.yaml", epochs=1)
    (here / "sweep_plugin.py").write_text("import pathlib\npathlib.Path('executed').write_text('x')\n")
    grid = ("--grid", "learning_rate=0.1", "--data-root", waves, "--output", "sweep")
    code, _, err = cli("sweep", recipe, *grid, "--plugin", "sweep_plugin")
    assert code == 0, err
    (here / "executed").unlink()
    del sys.modules["sweep_plugin"]
    assert "give --plugin sweep_plugin" in refused("sweep", "--resume", "sweep", "--data-root", waves)
    assert not (here / "executed").exists()
    sys.modules.pop("sweep_plugin", None)
    assert cli("sweep", "--resume", "sweep", "--data-root", waves, "--plugin", "sweep_plugin")[0] == 0
