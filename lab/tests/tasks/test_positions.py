"""Runs of the task ``sequence_labels``: what they learn and leave behind, and how they go on after a stop."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import yaml
from runs.small_runs import assert_same_outcome, read_json, stopped_at, train_arguments, trained_run

from kernel_attention.errors import InputError
from kernel_attention_lab.cli import main
from kernel_attention_lab.data.positions import POSITION_TASKS
from kernel_attention_lab.data.texts.text import IGNORED
from kernel_attention_lab.evidence import make_records
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.runs import list_recipes, read_recipe
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.sequence_labels import PositionExperiment, PositionLearning, measure_positions

pytestmark = pytest.mark.usefixtures("brief")

RECALL = {
    "task": "sequence_labels",
    "dataset": "mqar",
    "options": {"vocabulary": 12},
    "train_at": [{"length": 8, "items": 1}, {"length": 12, "items": 3}],
    "attention": ["softmax", {"primal": {"rank": 3, "eta": 0.1}}],
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "batch_size": 4,
    "steps": 12,
    "warmup_steps": 2,
    "evaluate_every": 4,
    "evaluation_cases": 6,
    "optimizer": "adamw",
    "accelerator": "cpu",
    "threads": 1,
}


def arguments(folder, **changes):
    return train_arguments(folder, RECALL | changes)


def trained(folder, **changes):
    return trained_run(folder, RECALL | changes)


def test_a_run_learns_and_leaves_the_accuracy_of_every_set(tmp_path):
    """Induction heads of length 3 need one look at the position before; the figures are those of the loop."""
    folder = trained(
        tmp_path / "run", dataset="induction_heads", attention="softmax", options={"vocabulary": 4},
        train_at=[{"length": 3}], test_at=[{"length": 3}, {"length": 5}], steps=150, evaluate_every=50,
        embed_dim=16, batch_size=32, evaluation_cases=50, learning_rate=0.02, dropout=0.0,
    )  # fmt: skip
    rows, evaluation = read_json(folder / "seed-0/metrics.json"), read_json(folder / "seed-0/evaluation.json")
    assert [(row["epoch"], row["step"]) for row in rows] == [(1, 50), (2, 100), (3, 150)]
    assert {"train_loss", "train_accuracy", "val_loss", "val_accuracy", "tokens_per_second"} <= rows[0].keys()
    assert evaluation["accuracy_length_3"] == 1.0
    assert evaluation["positions_length_3"] == evaluation["positions_length_5"] == 50
    accuracies = [evaluation["accuracy_length_3"], evaluation["accuracy_length_5"]]
    assert evaluation["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-12)
    facts = read_json(folder / "data.json")
    assert (facts["in_features"], facts["num_outputs"], facts["max_len"]) == (5, 5, 5)
    model = load_run(folder).model(0)
    task = make_recipe(read_config(folder)).test_tasks()["length_5"]
    inputs, targets = task.fixed("test", 50)
    with torch.inference_mode():
        right = [int(model(x[None])[0, -1].argmax()) == y[-1] for x, y in zip(inputs, targets, strict=True)]
    assert evaluation["accuracy_length_5"] == np.mean(right)
    (record,) = make_records(folder)
    assert record.figures["evaluation"]["accuracy_length_3"] == 1.0
    write_report(folder)  # which runs of tests leave out
    assert "classes of positions" in (folder / "report.html").read_text()


def read_config(folder):
    return yaml.safe_load((folder / "config.yaml").read_text())


@pytest.mark.parametrize("at", [6])
def test_a_run_stopped_at_any_step_ends_as_if_it_had_not(at, tmp_path, capsys):
    (tmp_path / "reference").mkdir()
    reference = trained(tmp_path / "reference" / "run", steps=8)
    with stopped_at(PositionLearning, at):
        assert main(arguments(tmp_path / "run", steps=8)) == 1
    assert f"(seed 0: checkpoint after step {at})\n" in capsys.readouterr().err
    assert main(["train", "--resume", str(tmp_path / "run"), "--progress", "false"]) == 0
    assert_same_outcome(tmp_path / "run", reference)


def test_real_inputs_without_a_causal_mask(tmp_path):
    """conv2d has no causal form; contamination at test time changes no other key."""
    folder = trained(
        tmp_path / "run", dataset="noisy_retrieval", options={"items": 6, "length": 10}, is_causal=False,
        attention=["rpc", {"conv2d": {"grid_size": [2, 5]}}], train_at=[],
        test_at=[{"contamination": rate} for rate in (0.0, 0.5)], steps=4,
    )  # fmt: skip
    evaluation = read_json(folder / "seed-0/evaluation.json")
    assert {"accuracy_contamination_0.0", "accuracy_contamination_0.5"} <= evaluation.keys()
    assert main(["evaluate", str(folder), "--output", str(tmp_path / "figures.json")]) == 0
    (again,) = read_json(tmp_path / "figures.json")
    assert again["accuracy"] == evaluation["accuracy"]


def test_the_diagnosed_cases_are_those_of_the_test_sets():
    experiment = PositionExperiment(make_recipe(RECALL))
    for cases, counts in ((5, [2, 2]), (1, [1]), (99, [4, 2, 4, 2])):
        found = [len(inputs) for (inputs,) in experiment.batches(cases)]
        assert found == counts
    sets = [task.fixed("test", 6).inputs for task in experiment.recipe.test_tasks().values()]
    assert torch.equal(torch.cat([x for (x,) in list(experiment.batches(99))[:2]]), sets[0])


def test_measured_figures_are_means_over_labelled_positions():
    """A model that says what it is told: wrong at chosen places, whatever the batches."""
    experiment = PositionExperiment(make_recipe(RECALL | {"attention": "softmax"}))
    torch.manual_seed(0)
    model = experiment.build_model(experiment.recipe, experiment.facts()).eval()
    task = experiment.recipe.test_tasks()["length_12_items_3"]
    batch = task.fixed("test", 6)
    with torch.inference_mode():
        log_p = model(batch.inputs).double().log_softmax(-1)
    rows = [
        (log_p[case, place], int(label))
        for case, labels in enumerate(batch.targets.tolist())
        for place, label in enumerate(labels)
        if label != IGNORED
    ]
    for size in (6, 4):
        parts = [type(batch)(*part) for part in zip(*(each.split(size) for each in batch), strict=True)]
        loss, accuracy, count = measure_positions(model, parts)
        assert count == len(rows) == 18
        assert accuracy == np.mean([int(row.argmax()) == label for row, label in rows])
        assert loss == pytest.approx(-np.mean([float(row[label]) for row, label in rows]), rel=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dataset": "mqr"}, "did you mean 'mqar'"),
        ({"options": {"vocabulari": 12}}, "unknown option of mqar 'vocabulari'"),
        ({"train_at": [{"length": 9}]}, "length=9 must be even"),
        ({"test_at": [{"length": 8, "items": 1}] * 2}, "has an entry twice"),
        ({"test_at": [{"length": 8, "items": 1, "vocabulary": 20}]}, "change the number of tokens"),
        ({"attention": "tensor"}, "cannot be a layer of a causal model"),
        ({"protocol": "paper"}, "a generated data set has a validation set, use holdout"),
        ({"evaluation_cases": 0}, "evaluation_cases=0"),
    ],
    ids=str,
)
def test_bad_recipes(change, message, tmp_path, capsys):
    assert main(arguments(tmp_path / "run", **change)) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


ABILITIES = [name for name in list_recipes() if name.startswith("abilities/")]


def test_there_is_a_recipe_for_every_generated_task():
    names = [name.partition("/")[2] for name in ABILITIES]
    assert names == sorted([*POSITION_TASKS, "mqar_published", "recall"])


@pytest.mark.parametrize("name", ABILITIES)
def test_a_shipped_recipe_is_of_its_task_and_small(name):
    recipe = make_recipe(read_recipe(name)[1])
    task = name.partition("/")[2]
    assert recipe.dataset == ("mqar" if task == "recall" else task.removesuffix("_published"))
    assert (recipe.embed_dim, recipe.num_layers, recipe.is_causal) == (64, 2, True)
    assert (2 if recipe.dataset == task else 1) <= len(recipe.test_tasks()) <= 4
    for each in recipe.test_tasks().values():
        labels = int((each.fixed("test", 1).targets != IGNORED).sum())
        assert recipe.evaluation_cases * labels >= 400, "a standard error of at most 2.5 points"


def test_the_published_small_setting():
    """Arora et al. 2023: the least of the points of figure 2, and the model of its code."""
    recipe = make_recipe(read_recipe("abilities/mqar_published")[1])
    (task,) = recipe.test_tasks().values()
    assert (task.length, task.items, task.vocabulary, task.power) == (64, 4, 8192, 0.01)
    assert (recipe.embed_dim, recipe.tied, recipe.positions) == (64, True, "learnt_normal")


def test_the_shipped_grid_of_associative_recall_is_the_papers():
    """Arora et al. 2023, figure 2."""
    tasks = make_recipe(read_recipe("abilities/mqar")[1]).test_tasks().values()
    assert [(task.length, task.items) for task in tasks] == [(64, 4), (128, 8), (256, 16), (512, 64)]


def test_unknown_positions_are_refused():
    with pytest.raises(InputError, match="train_at"):
        make_recipe(RECALL | {"train_at": {"length": 8}})
