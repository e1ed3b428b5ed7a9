"""Policies that cannot be trained or played: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import json
import shutil

import gymnasium
import pytest
import yaml
from tasks.decision_data import (
    CART,
    DECISIONS,
    INVERTED,
    PENDULUM,
    make_decisions,
    played,
    space_text,
    write_minari,
)

from kernel_attention_lab.cli import main
from kernel_attention_lab.control import find_renderer

pytestmark = pytest.mark.usefixtures("_offline", "brief")


@pytest.fixture
def _offline(monkeypatch):
    """No data set is downloaded."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_decisions(tmp_path_factory.mktemp("decisions"))


def recipe_in(folder, **changes):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(DECISIONS | changes, sort_keys=False))
    return path


def test_an_unknown_data_set_is_answered_with_those_at_hand(root, refused, tmp_path):
    path = recipe_in(tmp_path, dataset="tiny/cart/mixed-v1")
    said = refused("train", path, "--data-root", root, "--output", "run")
    assert "unknown dataset 'tiny/cart/mixed-v1'" in said
    assert f"at hand in {root / 'minari'}" in said
    assert f"{CART}, {PENDULUM}" in said
    said = refused("train", path, "--data-root", root, "--output", "run", "--dataset", "x.hdf5")
    assert "dataset 'x.hdf5': no such file" in said
    assert CART in said


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": "Pendulum-v1"}, "environment Pendulum-v1: its states are"),
        ({"environment": "MountainCar-v0"}, "environment MountainCar-v0: its states are"),
        ({"environment": "Acrobot-v1", "dataset": PENDULUM}, "environment Acrobot-v1: its states are"),
        ({"environment": "CartPole-v7"}, "environment 'CartPole-v7' cannot be made"),
        ({"environment": "os:CartPole-v1"}, "is not the name of a registered environment"),
        ({"attention": "tensor"}, "cannot be a layer of a causal model"),
        ({"validation_fraction": 0.99}, "none is left to train on"),
        ({"dataset": f"{CART}+{PENDULUM}"}, "cannot be joined"),
    ],
)
def test_what_does_not_fit_the_data_is_refused(changes, message, root, refused, tmp_path):
    path = recipe_in(tmp_path, **changes)
    assert message in refused("train", path, "--data-root", root, "--output", "run")


def test_data_that_name_no_environment_ask_for_one(refused, tmp_path):
    made = gymnasium.make("CartPole-v1")
    spaces = (space_text(made.observation_space), space_text(made.action_space))
    write_minari(tmp_path / "minari", CART, played("CartPole-v1", 4), "CartPole-v1", spaces, env_spec=None)
    said = refused("train", recipe_in(tmp_path), "--data-root", tmp_path, "--output", "run")
    assert "names no environment; give one, as --environment Hopper-v5" in said


def test_a_missing_package_is_named_with_its_extra(tmp_path, forks):
    """In a process where one after the other cannot be imported; the data are of an environment of MuJoCo."""
    packages = ("minari", "gymnasium", "mujoco", "h5py")  # each before another imports it
    make_decisions(tmp_path, mujoco=True)
    path = recipe_in(tmp_path, dataset=INVERTED)
    words = ["train", str(path), "--data-root", str(tmp_path), "--output", str(tmp_path / "run")]
    script = (
        "import sys\n"
        "from kernel_attention_lab.cli import main\n"
        f"for package in {packages!r}:\n"
        "    sys.modules[package] = None\n"
        f"    assert main({words!r}) == 2, package\n"
        "    del sys.modules[package]"
    )
    process = forks.run("-c", script)
    assert process.returncode == 0, process.stderr
    needs = "needs {}, which is not installed: pip install 'kernel-attention-lab[control]'"
    for package, said in zip(packages, process.stderr.splitlines(), strict=True):
        assert needs.format(package) in said, said
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    """A run on CartPole. Only to be read."""
    folder = tmp_path_factory.mktemp("runs")
    path = recipe_in(folder, steps=4)
    words = ["train", path, "--data-root", root, "--output", folder / "run", "--progress", "false"]
    assert main([str(word) for word in words]) == 0
    return folder / "run"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--frames", "0"], "frames=0 must be a whole number between 1 and 400"),
        (["--side", "5"], "side=5 must be a whole number between 16 and 1024"),
        (["--memory", "long"], "--memory 'long' must be one of sliding, recurrent"),
        (["--seed", "3"], "seed=3 is not in"),
        (["--target", "much"], "--target 'much'"),
    ],
)
def test_play_refuses(options, message, finished, refused):
    assert message in refused("play", finished, *options)


def test_play_needs_a_policy(trained, refused):
    assert "task time_series plays no episode (accepted: decisions)" in refused("play", trained)


def test_play_says_what_opengl_lacks(finished, refused, monkeypatch, tmp_path):
    """The run is made one of an environment that MuJoCo draws; the backend asked for does not exist."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    text = (folder / "data.json").read_text().replace("CartPole-v1", "InvertedPendulum-v5")
    (folder / "data.json").write_text(text)
    monkeypatch.setenv("MUJOCO_GL", "nothing")
    find_renderer.cache_clear()
    try:
        said = refused("play", folder)
    finally:
        find_renderer.cache_clear()
    assert "InvertedPendulum-v5 cannot be drawn without a screen (nothing: " in said
    assert "libosmesa6" in said


def test_a_run_folder_names_no_code(finished, refused, tmp_path):
    """data.json comes from whoever made the run."""
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    text = (folder / "data.json").read_text().replace("CartPole-v1", "boom:CartPole-v1")
    (folder / "data.json").write_text(text)
    assert "'boom:CartPole-v1' is not the name of a registered environment" in refused("play", folder)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("reference", ["low", 3], "does not describe an environment"),
        ("state_dim", "four", "does not describe a data set"),
        ("action_dim", 3, "does not fit the run's recipe"),
    ],
)
def test_damaged_facts_are_named(key, value, message, finished, refused, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(finished, folder)
    facts = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps(facts | {key: value}))
    assert message in refused("play", folder)


def test_options_of_policies_are_for_policies(trained, refused):
    said = refused("evaluate", trained, "--memory", "sliding")
    assert "--memory is not for runs of task time_series" in said
