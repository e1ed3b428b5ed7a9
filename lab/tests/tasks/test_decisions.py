"""Runs of the task ``decisions``: what they learn and leave, and that they go on where they stopped."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from runs.small_runs import assert_same_outcome, read_json, stopped_at, train_arguments, trained_run
from tasks.decision_data import DECISIONS, INVERTED, PENDULUM, make_decisions

from kernel_attention.errors import InputError
from kernel_attention.models import DecisionTransformer, StatePolicy
from kernel_attention_lab.cli import main
from kernel_attention_lab.control import find_renderer
from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.reporting.report import render
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.decisions import DecisionExperiment, DecisionTask, action_loss

REAL = Path(os.environ.get("MINARI_DATASETS_PATH", "/nowhere")) / "mujoco-local"

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_decisions(tmp_path_factory.mktemp("decisions"))


def arguments(folder, root, **changes):
    return train_arguments(folder, DECISIONS | changes, root)


def trained(folder, root, **changes):
    return trained_run(folder, DECISIONS | changes, root)


@pytest.fixture(scope="module")
def finished(root, tmp_path_factory):
    """A run on CartPole. Only to be read."""
    return trained(tmp_path_factory.mktemp("runs") / "run", root, seeds=[0, 1], curve_episodes=2)


def test_a_run_learns_and_its_policy_is_better_than_chance(root, tmp_path):
    """Two actions at even odds have a cross-entropy of log 2."""
    changes = {"attention": "softmax", "embed_dim": 16, "dropout": 0.0, "steps": 120, "evaluate_every": 60}
    folder = trained(tmp_path / "run", root, **changes, learning_rate=0.02, batch_size=16)
    rows, evaluation = read_json(folder / "seed-0/metrics.json"), read_json(folder / "seed-0/evaluation.json")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 60), (2, 120)]
    assert rows[1]["train_loss"] < min(rows[0]["train_loss"], np.log(2))
    assert evaluation["normalized_score"] > evaluation["random_normalized_score"] + 10
    assert evaluation["best_step"] == 120, "the last weights are reported"


def test_what_a_run_leaves_behind(finished):
    evaluation, summary = read_json(finished / "seed-0/evaluation.json"), read_json(finished / "summary.json")
    assert summary["metric"] == "normalized_score"
    assert summary["values"] == [
        read_json(finished / f"seed-{seed}/evaluation.json")["normalized_score"] for seed in (0, 1)
    ]
    played = read_json(finished / "seed-0/episodes.json")
    returns = np.array(played["played"]["60"]["returns"])
    assert evaluation["episode_return"] == pytest.approx(returns.mean())
    assert evaluation["episode_return_deviation"] == pytest.approx(returns.std(ddof=1))
    assert evaluation["normalized_score"] == pytest.approx(100 * (returns.mean() - 20) / 60)
    assert evaluation["normalized_score_target_20"] == pytest.approx(
        100 * (np.mean(played["played"]["20"]["returns"]) - 20) / 60
    )
    assert evaluation["data_normalized_score"] == pytest.approx(100 * (np.mean(played["recorded"]) - 20) / 60)
    assert evaluation["best_data_normalized_score"] == pytest.approx(
        100 * (max(played["recorded"]) - 20) / 60
    )
    assert {"gymnasium", "loss", "target_return", "memory"} <= evaluation.keys()
    row = read_json(finished / "seed-0/metrics.json")[-1]
    assert {"train_loss", "val_loss", "val_normalized_score", "objective_layer_1"} <= row.keys()
    report = render(read_run(finished))
    assert "An episode in pictures" not in report
    assert all(word in report for word in ("Episodes", "random actions", "asked for", "normalized score"))


@pytest.mark.parametrize(("attention", "at"), [(DECISIONS["attention"], 6)])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(attention, at, root, tmp_path, capsys):
    """Inside a round, with dropout and episodes played between the rounds."""
    (tmp_path / "reference").mkdir()
    changes = {"attention": attention, "curve_episodes": 1}
    reference = trained(tmp_path / "reference" / "run", root, **changes)
    with stopped_at(DecisionTask, at):
        assert main(arguments(tmp_path / "run", root, **changes)) == 1
    assert f"(seed 0: checkpoint after step {at})\n" in capsys.readouterr().err
    resume = ["train", "--resume", str(tmp_path / "run"), "--data-root", str(root), "--progress", "false"]
    assert main(resume) == 0
    assert_same_outcome(tmp_path / "run", reference)


def test_evaluate_gives_the_figures_of_training_and_other_ones_where_asked(finished, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = read_json(finished / "seed-0/evaluation.json")
    assert main(["evaluate", str(finished), "--output", "a.json"]) == 0
    found = read_json(tmp_path / "a.json")[0]
    same = [key for key in expected if key.startswith(("normalized", "episode", "random", "data"))]
    assert {key: found[key] for key in same} == {key: expected[key] for key in same}
    other = ["--evaluation-episodes", "2", "--memory", "recurrent", "--target-returns", "[33]"]
    assert main(["evaluate", str(finished), *other, "--output", "b.json"]) == 0
    found = read_json(tmp_path / "b.json")[0]
    assert (found["episodes"], found["memory"], found["target_return"]) == (2, "recurrent", 33.0)
    assert not any("_target_" in key for key in found)


def test_actions_of_numbers_keep_their_range_and_their_scale(root, tmp_path):
    """Pendulum has no reference scores: the headline is the return. Its actions go from -2 to 2."""
    changes = {"dataset": PENDULUM, "target_returns": [], "return_scale": 100.0, "evaluation_episodes": 2}
    folder = trained(tmp_path / "run", root, **changes, steps=4)
    evaluation, facts = read_json(folder / "seed-0/evaluation.json"), read_json(folder / "data.json")
    assert read_json(folder / "summary.json")["metric"] == "episode_return"
    assert -2000 < evaluation["episode_return"] < 0
    assert evaluation["target_return"] == facts["best_return"]
    assert facts["max_timestep"] == 200, "the environment's, longer than the recorded episodes"
    model = load_run(folder).model()
    assert (model.action_center.tolist(), model.action_radius.tolist()) == ([0.0], [2.0])
    states = DecisionExperiment(load_run(folder).recipe, root)._split[0].states
    np.testing.assert_allclose(model.input_mean.numpy(), states.mean(axis=0), atol=1e-5)


def test_cloning_reads_the_best_episodes_and_has_no_attention(root, tmp_path):
    """The same recipe with another policy; one tenth of the episodes is one of ten."""
    folder = trained(tmp_path / "run", root, attention="none", best_fraction=0.1)
    assert isinstance(load_run(folder).model(), StatePolicy)
    assert read_json(folder / "summary.json")["attention"] == "none"
    assert "<title>Behaviour cloning on" in render(read_run(folder))
    recipe = make_recipe(DECISIONS | {"attention": "none", "best_fraction": 0.1})
    train, held_out = DecisionExperiment(recipe, root)._split
    whole, _ = DecisionExperiment(make_recipe(DECISIONS), root)._split
    assert (len(train), len(whole), len(held_out)) == (1, 10, 2)
    assert train.returns == whole.returns.max()


def test_the_loss_is_that_of_the_real_steps(root):
    recipe = make_recipe(DECISIONS | {"dataset": PENDULUM, "context": 60, "dropout": 0.0})
    experiment = DecisionExperiment(recipe, root)
    batch = next(iter(experiment.loaders(0)[0]))
    assert not batch.is_real.all()
    torch.manual_seed(0)
    model = experiment.build_model(recipe, experiment.facts())
    experiment.prepare(model, 0)
    outputs = model(*batch.arguments)
    assert isinstance(model, DecisionTransformer)
    errors = [
        (outputs[i, k] - batch.actions[i, k]).square().mean()
        for i, k in zip(*torch.nonzero(batch.is_real, as_tuple=True), strict=True)
    ]
    torch.testing.assert_close(action_loss(outputs, batch), torch.stack(errors).mean())


def test_the_states_a_recipe_cannot_be_in():
    for changes, message in (
        ({"protocol": "paper"}, "no episode chooses the weights"),
        ({"norm_first": False}, "norm_first=true"),
        ({"target_returns": [3.0, 3.0]}, "given twice"),
        ({"best_fraction": 0.0}, "best_fraction=0"),
        ({"memory": "long"}, "memory='long'"),
        ({"attention": "nothing"}, "nothing"),
    ):
        with pytest.raises(InputError, match=message):
            make_recipe(DECISIONS | changes)


def test_analyze_reads_held_out_windows(finished, tmp_path):
    output = tmp_path / "figures"
    assert main(["analyze", str(finished), "--cases", "3", "--output", str(output)]) == 0
    found = read_json(output / "seed-0/diagnostics.json")
    assert [layer["mechanism"] for layer in found["layers"]] == ["softmax", "primal"]


@pytest.mark.skipif(not REAL.is_dir(), reason="MINARI_DATASETS_PATH has no data sets mujoco-local/*")
def test_a_shipped_recipe_trains_on_the_real_data_and_plays_in_mujoco(tmp_path, monkeypatch):
    """Two steps of a narrow model: the hopper falls, and its score is near that of random actions."""
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(REAL.parent))
    small = ["--steps", "2", "--evaluate_every", "2", "--warmup_steps", "0", "--embed_dim", "16"]
    small += [
        "--evaluation_episodes",
        "2",
        "--threads",
        "1",
        "--progress",
        "false",
        "--output",
        str(tmp_path / "run"),
    ]
    assert main(["train", "control/hopper_medium_expert", *small]) == 0
    evaluation = read_json(tmp_path / "run/seed-0/evaluation.json")
    assert evaluation["data_normalized_score"] == pytest.approx(67.244, abs=0.01)
    assert evaluation["best_data_normalized_score"] > 110
    assert -1 < evaluation["normalized_score"] < 40
    assert 5 <= evaluation["episode_length"] < 1000
    assert {"normalized_score_target_1800", "mujoco"} <= evaluation.keys()


def test_play_writes_a_film_into_the_report(tmp_path, monkeypatch):
    """Of MuJoCo's InvertedPendulum, by a policy that has learnt nothing."""
    renderer, reasons = find_renderer()
    if renderer is None:
        pytest.skip(f"no OpenGL without a screen here: {reasons}")
    monkeypatch.setenv("MUJOCO_GL", renderer)
    root = make_decisions(tmp_path / "data", mujoco=True)
    changes = {"dataset": INVERTED, "target_returns": [], "steps": 2, "evaluate_every": 2}
    folder = trained(tmp_path / "run", root, **changes, warmup_steps=0)
    assert main(["play", str(folder), "--frames", "4", "--side", "32"]) == 0
    record = read_json(folder / "seed-0/episode.json")
    assert record["frames"] == min(4, record["length"])
    assert (folder / "seed-0/episode.gif").read_bytes().startswith(b"GIF8")
    report = (folder / "report.html").read_text()
    assert "An episode in pictures" in report
    assert "data:image/gif;base64," in report
    assert main(["play", str(folder), "--output", str(tmp_path / "there"), "--side", "32"]) == 0
    assert (tmp_path / "there/seed-0/episode.gif").is_file()
    (folder / "seed-0/episode.gif").write_text("no film")
    assert "episode.gif: not a GIF" in render(read_run(folder))
