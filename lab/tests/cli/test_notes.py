"""What a run says on standard error before it goes on: nothing, or a note that the user would want."""

from __future__ import annotations

import json

import pytest
from runs.small_runs import write_recipe

from kernel_attention.errors import note_once
from kernel_attention_lab.runs import list_recipes, read_recipe
from kernel_attention_lab.tasks import make_recipe

SILENT = "trains without an auxiliary objective: eta is 0 unless it is given"


@pytest.fixture
def err_of(cli, waves, tmp_path, brief):
    """Trains a small recipe for an epoch; what it wrote on standard error."""

    def run(*options, **changes):
        note_once.cache_clear()
        recipe = write_recipe(tmp_path / "recipe.yaml", **{"epochs": 1} | changes)
        arguments = ("--data-root", waves, "--output", "run", "--progress", "false", *options)
        code, _, err = cli("train", recipe, *arguments)
        assert code == 0
        return err

    return run


@pytest.mark.parametrize("attention", ["softmax", "{primal: {eta: 0.1}}", "{multilinear: {eta: 0}}"])
def test_a_run_that_does_what_was_said_has_no_note(attention, err_of):
    assert err_of("--attention", attention) == ""


@pytest.mark.parametrize("attention", ["primal", "{multilinear: {rank: 2}}", "[softmax, primal]"])
def test_a_run_that_leaves_the_objective_out_says_so_once(attention, err_of):
    err = err_of("--attention", attention)
    assert err.startswith("note: attention '")
    assert SILENT in err
    assert err.count("\n") == 1


def test_fewer_epochs_than_between_two_evaluations(err_of, here):
    """As ``train uea/handwriting --epochs 1``, whose recipe evaluates every second epoch."""
    err = err_of(evaluate_every=2)
    assert err == (
        "note: evaluate_every=2 exceeds epochs=1: the model is evaluated once, after the last epoch\n"
    )
    assert json.loads((here / "run/seed-0/evaluation.json").read_text())["best_epoch"] == 1


@pytest.mark.parametrize("name", ["uea/handwriting", "primal_dual/libras"])
def test_every_recipe_can_be_tried_for_one_epoch(name):
    recipe = make_recipe(read_recipe(name)[1] | {"epochs": 1})
    assert (recipe.evaluate_every, recipe.rounds_per_evaluation) == (2, 1)


def test_shipped_recipes_say_whether_they_have_an_objective():
    assert [name for name in list_recipes() if make_recipe(read_recipe(name)[1]).remarks()] == []
