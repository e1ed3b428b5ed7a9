"""``reproduce`` trains what has no record, once, and compares with what was reported."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from checkout import SOURCES
from runs.small_runs import BRIEF, brief, waves, write_recipe  # noqa: F401

from kernel_attention_lab import cli
from kernel_attention_lab.evidence import Cell, Places, find_state, read_suite, run_cell
from kernel_attention_lab.lock import locked
from kernel_attention_lab.runs.run import train

ROOT = Path(__file__).parents[3]

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture
def suite(tmp_path: Path) -> Path:
    """A suite file of two rows, two recipes and two seeds."""
    recipes = {name: str(write_recipe(tmp_path / f"{name}.yaml", epochs=1)) for name in ("short", "long")}
    content = {
        "title": "Two rows on two recipes",
        "source": "nobody",
        "records": "waves/small",
        "columns": recipes,
        "column_keys": {"long": {"epochs": 2}},
        "rows": {"softmax": {"attention": "softmax"}, "linear": {"attention": "linear"}},
        "seeds": [0, 1],
        "baselines": {"default": "softmax"},
        "reported": {"linear": {"short": [98.7, 0.5]}},
    }
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def reproduce(suite: Path, root: Path, *options: str) -> int:
    here = suite.parent
    places = ("--runs", str(here / "runs"), "--results", str(here / "results"), "--data_root", str(root))
    return cli.main(["reproduce", str(suite), *places, *options])


def records(suite: Path) -> dict[str, dict]:
    folder = suite.parent / "results"
    return {
        path.relative_to(folder).as_posix(): json.loads(path.read_text())
        for path in sorted(folder.rglob("*.json"))
    }


def test_every_cell_has_a_record_and_is_trained_once(suite, waves, capsys):  # noqa: F811
    assert reproduce(suite, waves) == 0
    first = records(suite)
    assert sorted(first) == [
        f"waves/small/{column}/{row}-{seed}.json"
        for column in ("long", "short")
        for row in ("linear", "softmax")
        for seed in (0, 1)
    ]
    record = first["waves/small/long/linear-1.json"]
    assert (record["label"], record["seed"], record["config"]["epochs"]) == ("linear", 1, 2)
    assert (record["recipe"], record["config"]["attention"]) == (str(suite.parent / "long.yaml"), "linear")
    capsys.readouterr()
    shutil.rmtree(suite.parent / "runs")
    assert reproduce(suite, waves) == 0
    assert records(suite) == first
    left = [path.name for path in (suite.parent / "runs").rglob("*") if path.is_file()]
    assert left == ["report.html"], "nothing is left to train; the page is written from the records"
    printed = capsys.readouterr().out
    assert "98.70 ± 0.50" in printed


def test_a_part_of_a_suite(suite, waves):  # noqa: F811
    assert reproduce(suite, waves, "--rows", "linear", "--columns", "short", "--seeds", "5") == 0
    assert list(records(suite)) == ["waves/small/short/linear-5.json"]


def test_dry_run_writes_nothing(suite, waves, capsys):  # noqa: F811
    assert reproduce(suite, waves, "--dry_run") == 0
    assert "0 of 8 are done" in capsys.readouterr().out
    assert not (suite.parent / "results").exists()
    assert reproduce(suite, waves, "--columns", "short", "--seeds", "0") == 0
    capsys.readouterr()
    assert reproduce(suite, waves, "--columns", "short", "--dry_run") == 0
    printed = capsys.readouterr().out
    assert "2 of 4 are done" in printed
    assert "hours" in printed, "the record tells how long a training takes"


def test_dry_run_generates_no_data(tmp_path, capsys):
    """The images of Pathfinder, which take minutes; nothing is missing where a training generates it."""
    places = ("--runs", str(tmp_path / "runs"), "--results", str(tmp_path / "results"))
    options = ("--columns", "Pathfinder-16", "--rows", "softmax", "--data_root", str(tmp_path), "--dry_run")
    assert cli.main(["reproduce", "equal_time", *places, *options]) == 0
    assert "0 of 2 are done" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_dry_run_downloads_nothing(suite, waves, monkeypatch, capsys):  # noqa: F811
    def fetched(*arguments, **named):
        raise AssertionError("a dry run downloads")

    monkeypatch.setattr("aeon.datasets.load_classification", fetched)
    content = yaml.safe_load(suite.read_text())
    content["column_keys"]["long"]["dataset"] = "EthanolConcentration"
    suite.write_text(yaml.safe_dump(content))
    assert reproduce(suite, waves, "--dry_run") == 0
    printed = " ".join(capsys.readouterr().out.replace("│", "").split())
    rows = ("softmax short", "linear short", "softmax long", "linear long")
    assert all(f"{row} 0, 1 training" in printed for row in rows)
    assert printed.count("training (1)") == 2, "one of each row"
    assert printed.count("EthanolConcentration") == 1, "the reason is said once, below the table"
    assert "(1) dataset 'EthanolConcentration' is not on this machine" in printed


@pytest.mark.parametrize("seed", [0, 1])
def test_a_cell_without_a_plan_is_complete_without_it(seed, tmp_path):
    """A record of the repository, without AutoAttack: the suite asks it of seed 0 alone."""
    chosen = read_suite("cifar10_robustness")
    record = json.loads((ROOT / "results/vision/cifar10_robustness/symmetric-0.json").read_text())
    attacks = record["figures"]["robustness"]["attacks"]
    record["figures"]["robustness"]["attacks"] = [e for e in attacks if e["attack"] != "autoattack"]
    places = Places(tmp_path / "runs", tmp_path / "results")
    cell = Cell("symmetric", "cifar10", seed)
    path = places.record(chosen, cell)
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record | {"seed": seed}))
    state = find_state(chosen, cell, places)
    assert ("autoattack" in {step.attack for step in state.steps}) == (seed == 0)
    everywhere = [next(iter(plan)) if isinstance(plan, dict) else plan for plan in chosen.attack]
    state = find_state(dataclasses.replace(chosen, attack=everywhere), cell, places)
    assert "autoattack" in {step.attack for step in state.steps}


def test_missing_data_are_said_first_and_last(suite, tmp_path, capsys):
    content = yaml.safe_load(suite.read_text())
    suite.write_text(yaml.safe_dump(content | {"keys": {"dataset": str(tmp_path / "nowhere")}}))
    assert reproduce(suite, tmp_path, "--dry_run") == 0
    assert "nowhere" in "".join(capsys.readouterr().out.split())
    assert reproduce(suite, tmp_path) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len([line for line in lines if "nowhere" in line]) == 8
    assert not (tmp_path / "results").exists()


def test_a_record_of_another_recipe_is_not_taken(suite, waves, capsys):  # noqa: F811
    options = ("--rows", "linear", "--columns", "short", "--seeds", "0")
    assert reproduce(suite, waves, *options) == 0
    content = yaml.safe_load(suite.read_text())
    suite.write_text(yaml.safe_dump(content | {"keys": {"batch_size": 3}}))
    capsys.readouterr()
    assert reproduce(suite, waves, *options) == 2
    err = capsys.readouterr().err
    assert "was made with batch_size=7, suite small has 3" in err


def test_a_cell_that_another_process_trains_is_left_to_it(suite, waves, tmp_path, capsys):  # noqa: F811
    chosen = read_suite(str(suite))
    places = Places(tmp_path / "runs", tmp_path / "results", str(waves))
    held, other = list(chosen.cells(columns=["short"], seeds=[0]))
    folder = places.run(chosen, held)
    folder.mkdir(parents=True)
    with locked(folder):
        assert reproduce(suite, waves, "--columns", "short", "--seeds", "0") == 0
    err = capsys.readouterr().err
    assert f"{held}: left to the process that works on it" in err
    assert f"{held}: training" not in err, "it is said by the process that trains"
    assert f"{other}: training" in err
    assert find_state(chosen, held, places).training
    assert find_state(chosen, other, places).is_done
    assert run_cell(chosen, held, places, lambda line: None)
    assert find_state(chosen, held, places).is_done


def test_trained_models_are_diagnosed_once(suite, waves, tmp_path, capsys):  # noqa: F811
    """Also those that were trained before the suite asked for it. The distances have a table of their own."""
    options = ("--columns", "short", "--seeds", "0", "--rows", "linear")
    assert reproduce(suite, waves, *options) == 0
    (before,) = records(suite).values()
    assert "diagnostics" not in before["figures"]
    content = yaml.safe_load(suite.read_text())
    suite.write_text(yaml.safe_dump(content | {"diagnose": ["distance"], "further": {"head_distance": {}}}))
    chosen, places = read_suite(str(suite)), Places(tmp_path / "runs", tmp_path / "results")
    (cell,) = chosen.cells(["linear"], ["short"], [0])
    with locked(places.run(chosen, cell)):
        assert reproduce(suite, waves, *options) == 0
    assert f"{cell}: left to the process that works on it" in capsys.readouterr().err
    assert find_state(chosen, cell, places).diagnosis
    assert reproduce(suite, waves, *options) == 0
    (record,) = records(suite).values()
    assert record["date"] == before["date"], "it is not trained again"
    found = record["figures"]["diagnostics"]
    layers = json.loads((tmp_path / "runs/small/short/linear-0/seed-0/diagnostics.json").read_text())[
        "layers"
    ]
    assert found["head_distance"] == pytest.approx(
        sum(layer["summary"]["head_distance"] for layer in layers) / len(layers)
    )
    assert 0 < found["head_distance"] < 2**0.5
    assert (found["quantities"], "objective" in found) == (["distance"], False)
    assert find_state(chosen, cell, places).is_done
    assert "head distance" in (tmp_path / "runs/small/report.html").read_text().lower()
    shutil.rmtree(tmp_path / "runs/small/short")
    suite.write_text(yaml.safe_dump(content | {"diagnose": ["distance", "spectrum"]}))
    assert reproduce(suite, waves, *options) == 2
    assert "lacks diagnostics, and the weights" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_workers_train_every_cell_once(suite, waves, capsys, monkeypatch):  # noqa: F811
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.chdir(suite.parent)
    (suite.parent / "brief_runs.py").write_text(BRIEF)
    options = ("--seeds", "0", "--columns", "short")
    assert reproduce(suite, waves, "--workers", "2", *options, "--plugin", "brief_runs") == 0
    assert "OMP_NUM_THREADS" not in os.environ, "the parent's environment is as it was"
    found = records(suite)
    assert len(found) == 2
    dates = {name: record["date"] for name, record in found.items()}
    assert reproduce(suite, waves, *options) == 0
    assert {name: record["date"] for name, record in records(suite).items()} == dates
    assert "left to" not in capsys.readouterr().err


def test_an_interrupted_suite_says_how_it_goes_on(suite, waves, monkeypatch, capsys):  # noqa: F811
    from kernel_attention_lab.evidence import workers

    def interrupted(*cells):
        raise KeyboardInterrupt

    monkeypatch.setattr(workers, "run_cell", interrupted)
    assert reproduce(suite, waves) == 1
    said, goes_on = capsys.readouterr().err.splitlines()[-2:]
    assert said == f"saved: all that is done, in {suite.parent / 'runs'} and {suite.parent / 'results'}"
    assert goes_on == "resume: the same command goes on after it"


def test_a_cell_that_fails_does_not_stop_the_others(suite, waves, monkeypatch, capsys):  # noqa: F811
    def diverging(recipe, *arguments, **options):
        if recipe.attention == "softmax":
            raise FloatingPointError("the loss is nan")
        return train(recipe, *arguments, **options)

    monkeypatch.setattr("kernel_attention_lab.evidence.run.train", diverging)
    assert reproduce(suite, waves, "--columns", "short", "--seeds", "0") == 1
    assert "softmax, short, seed 0: FloatingPointError: the loss is nan" in capsys.readouterr().err
    assert list(records(suite)) == ["waves/small/short/linear-0.json"]


@pytest.mark.slow  # processes that import torch, twice
def test_a_worker_that_dies_is_said(suite, waves, tmp_path, monkeypatch, capsys):  # noqa: F811
    """A plugin ends each worker. The next command does the cells."""
    (tmp_path / "deadly.py").write_text(
        "import multiprocessing, os\nif multiprocessing.parent_process(): os._exit(9)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = ("--columns", "short", "--seeds", "0")
    assert reproduce(suite, waves, *options, "--workers", "2", "--plugin", "deadly") == 1
    err = capsys.readouterr().err
    assert "2 of 2 workers died" in err
    assert records(suite) == {}
    assert reproduce(suite, waves, *options) == 0
    assert len(records(suite)) == 2
    assert reproduce(suite, waves, *options, "--workers", "2", "--plugin", "deadly") == 0, (
        "nothing is left to do"
    )


@pytest.mark.slow
def test_workers_stop_with_the_command_that_started_them(suite, waves, tmp_path):  # noqa: F811
    """A cluster ends a job by SIGTERM, and whoever kills it leaves it no time at all."""
    (tmp_path / "patient.py").write_text(
        "import multiprocessing, os, pathlib, time\n"
        "if multiprocessing.parent_process():\n"
        "    pathlib.Path(f'{os.getpid()}.pid').touch()\n"
        "    time.sleep(600)\n"
    )
    command = [sys.executable, "-m", "kernel_attention_lab", "reproduce", str(suite), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--plugin", "patient", "--data_root", str(waves)], cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": f"{SOURCES}{os.pathsep}{tmp_path}"}, stderr=subprocess.DEVNULL,
    )  # fmt: skip

    def workers() -> list[Path]:
        return [path for path in tmp_path.glob("*.pid") if is_running(int(path.stem))]

    assert comes_true(lambda: len(workers()) == 2, seconds=120)
    process.kill()
    process.wait()
    assert comes_true(lambda: not workers(), seconds=20)


def is_running(number: int) -> bool:
    """Whether the process exists; one that has ended may stay until it is waited for."""
    try:
        return Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def comes_true(condition: Callable[[], bool], seconds: float) -> bool:
    limit = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > limit:
            return False
        time.sleep(0.1)
    return True


@pytest.fixture
def fine_tuning(tmp_path: Path) -> Path:
    """A suite whose rows start from language models, which are the rows of another suite."""
    from tasks.text_data import LANGUAGE
    from tasks.token_data import TOKENS, make_tokens

    make_tokens(tmp_path / "data")
    (tmp_path / "data/fables").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / f"data/fables/{name}.txt").write_text("the film is a lovely plot <unk>\n" * 20)
    sizes = {"steps": 2, "evaluate_every": 2, "attention": "symmetric"}
    recipes = {
        "language": LANGUAGE | sizes | {"context": 12, "max_len": 24},
        "sentences": TOKENS | sizes | {"dataset": "sst2", "is_causal": True},
    }
    for name, keys in recipes.items():
        (tmp_path / f"{name}_recipe.yaml").write_text(yaml.safe_dump(keys))
    first = {
        "title": "First", "source": "nobody", "records": "first", "metric": "perplexity",
        "columns": {"text": str(tmp_path / "language_recipe.yaml")}, "rows": {"symmetric": {}, "other": {}},
        "seeds": [0],
    }  # fmt: skip
    start = {"suite": str(tmp_path / "first.yaml"), "row": "symmetric", "column": "text"}
    second = {
        "title": "Second", "source": "nobody", "records": "second",
        "columns": {"sentences": str(tmp_path / "sentences_recipe.yaml")},
        "rows": {"symmetric": {}, "rpc": {"attention": "rpc"}, "from_nothing": {}},
        "starts": {"symmetric": start, "rpc": start}, "seeds": [0, 3],
    }  # fmt: skip
    (tmp_path / "first.yaml").write_text(yaml.safe_dump(first))
    (tmp_path / "second.yaml").write_text(yaml.safe_dump(second))
    return tmp_path / "second.yaml"


def test_what_a_row_starts_from_is_trained_first_and_once(fine_tuning, capsys):
    """By the cell of the other suite with the same seed; a row without a start begins from nothing."""
    here = fine_tuning.parent
    assert reproduce(fine_tuning, here / "data", "--seeds", "3", "--dry_run") == 0
    printed = capsys.readouterr().out
    assert printed.count("trained before them") == 1
    assert "trained before them: symmetric, text, seed 3 of suite first" in printed
    assert reproduce(fine_tuning, here / "data", "--seeds", "3") == 0
    found = records(fine_tuning)
    assert list(found) == [
        "first/symmetric-3.json", "second/from_nothing-3.json", "second/rpc-3.json", "second/symmetric-3.json"
    ]  # fmt: skip
    begun = {name: record["config"].get("start_from") for name, record in found.items()}
    assert list(begun.values()) == [None, "", "symmetric-3", "symmetric-3"]
    assert reproduce(fine_tuning, here / "data", "--seeds", "3") == 0
    assert records(fine_tuning) == found, "nothing is trained again"
    capsys.readouterr()
    assert reproduce(fine_tuning, here / "data", "--seeds", "3", "--dry_run") == 0
    assert "trained before them" not in capsys.readouterr().out


def test_the_data_of_a_start_are_missed_first(fine_tuning, capsys):
    data = fine_tuning.parent / "data"
    shutil.rmtree(data / "fables")
    assert reproduce(fine_tuning, data, "--rows", "rpc", "from_nothing", "--seeds", "0", "--dry_run") == 0
    lines = capsys.readouterr().out.splitlines()
    (begun,) = [line for line in lines if "from_nothing" in line]
    assert "fables" in "".join(lines).replace(" ", "")
    assert "fables" not in begun
