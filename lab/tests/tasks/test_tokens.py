"""Runs of the task ``tokens``: what they learn and leave behind, and that they go on where they stopped."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from runs.small_runs import assert_same_outcome, read_json, stopped_at, train_arguments, trained_run
from tasks.token_data import TOKENS, make_tokens

from kernel_attention.mechanisms import list_attention
from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.cli import main
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.tokens import TokenExperiment

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return make_tokens(tmp_path_factory.mktemp("tokens"))


def arguments(folder, root, **changes):
    return train_arguments(folder, TOKENS | changes, root)


def trained(folder, root, **changes):
    return trained_run(folder, TOKENS | changes, root)


def test_a_run_learns_and_says_how_fast(root, tmp_path):
    changes = {"dataset": "sst2", "steps": 90, "evaluate_every": 30, "swap_rate": 0.5, "dropout": 0.0}
    changes |= {"embed_dim": 16, "attention": "softmax", "learning_rate": 0.03}
    folder = trained(tmp_path / "run", root, **changes)
    rows, evaluation = read_json(folder / "seed-0/metrics.json"), read_json(folder / "seed-0/evaluation.json")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 30), (2, 60), (3, 90)]
    assert rows[-1]["train_loss"] < 0.5 < rows[0]["train_loss"]
    assert all(row["tokens_per_second"] > 0 and row["peak_rss_mb"] > 50 for row in rows)
    assert {"val_loss", "val_accuracy"} <= rows[0].keys()
    assert evaluation["accuracy"] > 0.7, "one word decides"
    assert evaluation["best_step"] == 30 * evaluation["best_epoch"]
    assert evaluation["cases"] == np.sum(evaluation["confusion_matrix"]) == 13
    assert unpack_bits(evaluation["correct_bits"], 13).mean() == evaluation["accuracy"]
    assert evaluation["swapped_loss"] > evaluation["loss"], "half of the words are gone"
    assert 0 <= evaluation["swapped_accuracy"] <= 1
    summary = read_json(folder / "summary.json")
    assert (summary["metric"], summary["mean"]) == ("accuracy", evaluation["accuracy"])
    assert yaml.safe_load((folder / "config.yaml").read_text())["task"] == "tokens"


@pytest.mark.parametrize(("dataset", "at"), [("sst2", 9), ("lra/retrieval", 6)])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(dataset, at, root, tmp_path, capsys):
    """4 steps a round through epochs of 8 (sst2) or 4 batches: the stops lie inside of both."""
    (tmp_path / "reference").mkdir()
    reference = trained(tmp_path / "reference" / "run", root, dataset=dataset)
    with stopped_at(SequenceTask, at):
        assert main(arguments(tmp_path / "run", root, dataset=dataset)) == 1
    assert f"(seed 0: checkpoint after step {at})\n" in capsys.readouterr().err
    assert (
        main(["train", "--resume", str(tmp_path / "run"), "--data-root", str(root), "--progress", "false"])
        == 0
    )
    assert_same_outcome(tmp_path / "run", reference)


def test_the_learning_rate_warms_up_and_decays(root):
    recipe = make_recipe(TOKENS | {"dataset": "sst2", "steps": 20, "warmup_steps": 4, "evaluate_every": 20})
    factors = [recipe.learning_rate_factor(step) for step in range(21)]
    np.testing.assert_allclose(factors[:4], [0.25, 0.5, 0.75, 1.0])
    np.testing.assert_allclose(factors[4:], np.linspace(1, 0, 17))
    constant = make_recipe(TOKENS | {"dataset": "sst2", "schedule": "constant"})
    assert [constant.learning_rate_factor(step) for step in (3, 11)] == [1.0, 1.0]
    root_decay = make_recipe(TOKENS | {"dataset": "sst2", "warmup_steps": 4, "schedule": "inverse_sqrt"})
    factors = [root_decay.learning_rate_factor(step) for step in (1, 3, 4, 15, 99)]
    np.testing.assert_allclose(factors, [0.5, 1.0, (4 / 5) ** 0.5, 0.5, 0.2])
    without_warmup = make_recipe(TOKENS | {"dataset": "sst2", "warmup_steps": 0, "schedule": "inverse_sqrt"})
    assert [without_warmup.learning_rate_factor(step) for step in (0, 3)] == [1.0, 0.5]
    task = SequenceTask(
        TokenExperiment.build_model(recipe, facts()),
        recipe.train_settings(),
        schedule=recipe.learning_rate_factor,
    )
    optimizer, _ = task.make_optimizer()
    assert optimizer.param_groups[0]["lr"] == 0.25 * recipe.learning_rate


def facts(length=24, parts=1):
    return {"vocabulary_size": 11, "max_len": length, "parts": parts, "class_names": ["a", "b", "c"]}


CHEAP = [mechanism.name for mechanism in list_attention() if mechanism.name != "conv2d"]


@pytest.mark.parametrize(("name", "parts"), [*((name, 1) for name in CHEAP), ("softmax", 2)])
def test_every_mechanism_takes_a_step(name, parts):
    """conv2d needs a grid of tokens; the others train on padded batches of single texts and of pairs."""
    recipe = make_recipe(TOKENS | {"dataset": "sst2", "attention": name, "embed_dim": 8})
    torch.manual_seed(0)
    model = TokenExperiment.build_model(recipe, facts(16, parts))
    shape = (3, 16) if parts == 1 else (3, 2, 16)
    x, mask = torch.randint(11, shape), torch.ones(shape, dtype=torch.bool)
    mask[1, ..., 12:] = False
    loss = torch.nn.functional.cross_entropy(model(x, mask), torch.tensor([0, 1, 2]))
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_sequences_beyond_max_len_are_refused_or_cut(root, tmp_path, capsys):
    options = {"dataset": "sst2", "max_len": 5}
    assert main(arguments(tmp_path / "run", root, **options)) == 2
    err = capsys.readouterr().err
    assert "more than max_len=5" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
    folder = trained(tmp_path / "cut", root, **options, truncate=True, steps=2, evaluate_every=2)
    assert read_json(folder / "data.json")["max_len"] == 5


def test_evaluate_and_predict_a_trained_run(root, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = trained(tmp_path / "run", root, dataset="sst2")
    expected = read_json(folder / "seed-0/evaluation.json")
    assert main(["evaluate", str(folder), "--data-root", str(root), "--output", "figures.json"]) == 0
    (found,) = read_json(tmp_path / "figures.json")
    assert (found["accuracy"], found["loss"]) == (
        expected["accuracy"],
        pytest.approx(expected["loss"], rel=1e-5),
    )
    (tmp_path / "new.txt").write_text("the film is lovely\na dull , tired plot\n")
    assert main(["predict", str(folder), "new.txt", "--output", "rows.json"]) == 0
    rows = read_json(tmp_path / "rows.json")
    assert [row["case"] for row in rows] == [0, 1]
    assert all(row["probability_negative"] + row["probability_positive"] == pytest.approx(1) for row in rows)
    for content, message in (
        (b"", "new.txt: is empty"),
        (b"caf\xe9\n", "is not UTF-8"),
        (b"film " * 50, "more than max_len="),
        (b"film\n\nfilm\n", "case 1 has no tokens"),
    ):
        (tmp_path / "new.txt").write_bytes(content)
        capsys.readouterr()
        assert main(["predict", str(folder), "new.txt"]) == 2
        err = capsys.readouterr().err
        assert message in err
        assert err.count("\n") == 1


def test_diagnostics_of_a_trained_run(root, tmp_path):
    folder = trained(tmp_path / "run", root, dataset="sst2", steps=4)
    assert (
        main(
            [
                "analyze",
                str(folder),
                "--data-root",
                str(root),
                "--cases",
                "5",
                "--output",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )
    assert (tmp_path / "o/seed-0/diagnostics.npz").is_file()


def test_changed_data_are_refused_in_a_short_line(root, tmp_path, capsys):
    own = make_tokens(tmp_path / "data")
    folder = trained(tmp_path / "run", own, dataset="sst2", steps=4)
    path = own / "sst/stsa.binary.train"
    path.write_text(path.read_text().replace("lovely", "charming"))
    capsys.readouterr()
    assert main(["evaluate", str(folder), "--data-root", str(own)]) == 2
    err = capsys.readouterr().err
    assert "vocabulary" in err
    assert len(err) < 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 10}, "steps=10 must be a multiple of evaluate_every=4"),
        ({"steps": 0}, "steps=0 must be a whole number of at least 1"),
        ({"swap_rate": 1.5}, "swap_rate=1.5"),
        ({"dataset": "lra/text", "swap_rate": 0.1}, "has no words"),
        ({"dataset": "lra/listop"}, "did you mean 'lra/listops'"),
        ({"epochs": 3}, "'epochs'"),
        ({"task": "token"}, "unknown task 'token'; did you mean 'tokens'"),
        ({"schedule": "cosine"}, "one of constant, linear"),
    ],
    ids=str,
)
def test_bad_recipes(change, message, root, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", root, **{"dataset": "sst2", **change})) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()
