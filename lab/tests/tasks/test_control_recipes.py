"""The recipes of decisions: the paper's settings and figures, at its size and at a small one."""

from __future__ import annotations

import re

import pytest

from kernel_attention.mechanisms.primal.layer import PrimalAttention
from kernel_attention_lab.evidence import read_suite
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.decisions import DecisionExperiment

# Table 2 of Primal-Attention's supplement: s = 32, 64, 96. Then the s of the released command.
TABLE = {
    "halfcheetah_medium_expert": (56.9, 73.1, 75.6, 96),
    "hopper_medium_expert": (111.2, 112.0, 111.1, 64),
    "walker2d_medium_expert": (108.7, 108.9, 109.0, 96),
    "halfcheetah_medium": (42.9, 43.1, 42.8, 64),
    "hopper_medium": (66.7, 63.1, 73.8, 96),
    "walker2d_medium": (75.1, 77.1, 77.0, 96),
    "halfcheetah_medium_replay": (39.5, 37.9, 39.3, 32),
    "hopper_medium_replay": (84.2, 91.7, 87.3, 64),
    "walker2d_medium_replay": (71.8, 70.4, 80.5, 96),
}
RANKS = (32, 64, 96)
TARGETS = {"halfcheetah": [12000.0, 6000.0], "hopper": [3600.0, 1800.0], "walker2d": [5000.0, 2500.0]}


def recipe_of(name):
    return make_recipe(read_recipe(f"control/{name}")[1])


def test_there_is_a_small_and_a_large_recipe_of_every_setting():
    found = {name.removeprefix("control/") for name in list_recipes() if name.startswith("control/")}
    assert found == {*TABLE, *(f"{name}_d4rl" for name in TABLE)}


@pytest.mark.parametrize("suffix", ["", "_d4rl"])
@pytest.mark.parametrize("name", TABLE)
def test_the_settings_are_the_papers(name, suffix):
    recipe = recipe_of(f"{name}{suffix}")
    *reported, rank = TABLE[name]
    last = {"rank": rank, "eta": 0.05, "data_dependent": False, "square_per": "sequence"}
    assert recipe.attention == ["softmax", "softmax", {"primal": last}]
    assert (recipe.num_layers, recipe.num_heads, recipe.context, recipe.dropout) == (3, 4, 20, 0.1)
    assert (recipe.optimizer, recipe.learning_rate, recipe.weight_decay) == ("adamw", 1e-3, 1e-4)
    assert (recipe.gradient_clip, recipe.return_scale, recipe.activation) == (0.25, 1000.0, "relu")
    assert recipe.target_returns == TARGETS[name.partition("_")[0]]
    if suffix:
        assert (recipe.embed_dim, recipe.feedforward_dim, recipe.batch_size) == (256, 1024, 64)
        assert (recipe.steps, recipe.warmup_steps, recipe.schedule) == (100_000, 10_000, "constant")
        assert recipe.evaluation_episodes == 100
        assert recipe.dataset == f"{name}-v2.hdf5"
    text = recipe_text(f"control/{name}{suffix}")
    (figure,) = re.findall(r"^# Reported.*: ([\d.]+)\.$", text, re.MULTILINE)
    assert float(figure) == reported[RANKS.index(rank)]


def test_the_suites_report_the_papers_figures():
    small, large = read_suite("primal_attention_d4rl"), read_suite("primal_attention_d4rl_rank")
    for name, (*reported, rank) in TABLE.items():
        assert small.reported["primal"][name] == reported[RANKS.index(rank)]
        assert [large.reported[f"s{each}"][name] for each in RANKS] == reported
    for suite in (small, large):
        recipes = {cell: suite.recipe(cell)[1] for cell in suite.cells()}
        for cell, recipe in recipes.items():
            if cell.row == "primal":
                assert recipe.attention[2]["primal"]["rank"] == TABLE[cell.column][3]
    assert {suite.metric for suite in (small, large)} == {"normalized_score"}


def test_the_models_are_made(tmp_path):
    """At both sizes; hopper has 11 numbers of a state and 3 of an action."""
    facts = {"state_dim": 11, "action_dim": 3, "max_timestep": 1000, "actions": "continuous"}
    for name, width in (("hopper_medium", 128), ("hopper_medium_d4rl", 256)):
        model = DecisionExperiment.build_model(recipe_of(name), facts)
        assert model.layers[2].attention.embed_dim == width
        assert isinstance(model.layers[2].attention, PrimalAttention)
        assert not model.layers[2].attention.data_dependent
