"""The recipes of Long Range Arena and of sentences: their figures are the papers', their variants build."""

from __future__ import annotations

import re

import pytest
import torch
import yaml

from kernel_attention.core.objective import auxiliary_loss
from kernel_attention.mechanisms import layer_specs
from kernel_attention_lab.evidence.suite import Cell, Suite, read_suite
from kernel_attention_lab.runs import list_recipes, read_recipe, recipe_text
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.tokens import TokenExperiment, TokenRecipe

# Batch, warm-up, steps of the released configuration; s and eta of the released commands (run_tasks.sh) of
# PrimalFormer and of Primal.+Trans.; poster: Transformer, Primal., Primal.+Trans.
LRA = {
    "listops": (32, 1000, 5000, (20, 0.1), (30, 0.05), (37.1, 37.3, 37.3)),
    "text": (32, 8000, 20000, (20, 0.05), (30, 0.1), (65.0, 61.2, 65.4)),
    "retrieval": (32, 800, 30000, (30, 0.0), (20, 0.05), (79.4, 77.8, 81.0)),
    "image": (256, 175, 35000, (30, 0.1), (30, 0.1), (38.2, 43.0, 43.9)),
    "pathfinder32": (256, 312, 62400, (30, 0.1), (20, 0.05), (74.2, 68.3, 74.3)),
}
# Primal-dual paper, table 14 (beta of BN, of BN+SH) and tables 2 and 7 (softmax, BN, SH, BN+SH, Conv1D).
PRIMAL_DUAL = {
    "listops": (0.5, 0.2, (36.76, 37.32, 37.08, 37.33, 37.20)),
    "text": (0.5, 0.8, (64.90, 65.07, 65.19, 65.03, 64.92)),
    "retrieval": (1.0, 1.0, (79.68, 81.05, 80.74, 81.20, 80.75)),
    "image": (0.2, 0.2, (39.23, 39.75, 38.87, 39.18, 39.18)),
    "pathfinder32": (0.2, 0.4, (72.72, 73.24, 74.00, 73.98, 73.01)),
}
SENTENCES = ("imdb", "imdb_uncertainty", "sst2", "sst5")


def recipe_of(name: str) -> TokenRecipe:
    recipe = make_recipe(read_recipe(name)[1])
    assert isinstance(recipe, TokenRecipe)
    return recipe


def primal(rank: int, eta: float) -> dict[str, object]:
    return {"primal": {"rank": rank, "eta": eta, "rank_multiplier": 10}}


def column_of(suite: Suite, task: str) -> str:
    return next(column for column, recipe in suite.columns.items() if recipe == f"lra/{task}")


def test_there_is_a_recipe_for_every_task():
    names = {name for name in list_recipes() if name.startswith(("lra/", "sentences/"))}
    known = {f"lra/{task}" for task in LRA} | {f"sentences/{task}" for task in SENTENCES}
    assert names == known | {"sentences/sst2_finetune"}  # it starts from a language model


@pytest.mark.parametrize("task", LRA)
def test_sizes_and_figures_are_those_of_the_release(task):
    recipe, (batch, warmup, steps, all_layers, last_layer, reported) = recipe_of(f"lra/{task}"), LRA[task]
    assert (recipe.batch_size, recipe.warmup_steps, recipe.steps) == (batch, warmup, steps)
    assert recipe.attention == primal(*all_layers)
    assert recipe.auxiliary_reduction == "mean", "the released code averages over the layers"
    shape = (recipe.embed_dim, recipe.num_heads, recipe.num_layers, recipe.feedforward_dim, recipe.dropout)
    assert shape == (64, 2, 2, 128, 0.1)
    assert (recipe.optimizer, recipe.learning_rate, recipe.schedule) == ("adam", 1e-4, "linear")
    assert (recipe.positions, recipe.norm_first, recipe.protocol) == ("learnt", True, "holdout")
    suite = read_suite("primal_attention_lra")
    column = column_of(suite, task)
    rows = ("softmax", "primal", "primal_last_layer")
    assert tuple(suite.reported[row][column] for row in rows) == reported
    made = [suite.recipe(Cell(row, column, 0))[1].attention for row in rows]
    assert made == ["softmax", primal(*all_layers), ["softmax", primal(*last_layer)]]


@pytest.mark.parametrize("task", LRA)
def test_the_variants_of_the_primal_dual_paper(task):
    bn, both, reported = PRIMAL_DUAL[task]
    suite = read_suite("primal_dual_lra")
    column = column_of(suite, task)
    rows = ("softmax", "batch_norm", "scaled_heads", "batch_norm_scaled_heads", "conv1d")
    assert tuple(suite.reported[row][column][0] for row in rows) == reported
    assert [suite.recipe(Cell(row, column, 0))[1].attention for row in rows] == [
        "softmax", {"batch_norm": {"beta": bn}}, {"scaled_heads": {"factors": [1, 2]}},
        {"batch_norm_scaled_heads": {"beta": both, "factors": [1, 2]}}, {"conv1d": {"kernel_size": 5}},
    ]  # fmt: skip


@pytest.mark.parametrize(
    "name", [*(f"lra/{task}" for task in LRA), *(f"sentences/{task}" for task in SENTENCES)]
)
def test_the_model_and_its_variants_take_a_step(name):
    recipe = recipe_of(name)
    parts = 2 if name == "lra/retrieval" else 1
    facts = {"vocabulary_size": 15, "max_len": 30, "parts": parts, "class_names": ["a", "b"]}
    if name.startswith("lra/"):
        suites = [read_suite(suite) for suite in ("primal_attention_lra", "primal_dual_lra")]
        made = [suite.recipe(cell) for suite in suites for cell in suite.cells(seeds=[0])]
        variants = [variant.attention for other, variant in made if other == name]
        assert len(variants) == 8
    else:
        text = recipe_text(name)
        variants = [
            yaml.safe_load(spec.strip("'")) for spec in re.findall(r"--attention (.+)$", text, re.MULTILINE)
        ]
        # The kernel-PCA paper: two iterations in every layer have lambda 3; symmetric is the baseline.
        assert variants == ["symmetric", {"rpc": {"iterations": 2, "lam": 3.0}}, "batch_norm"]
    for attention in [recipe.attention, *variants]:
        layer_specs(attention, recipe.num_layers)
        changed = make_recipe(read_recipe(name)[1] | {"attention": attention})
        model = TokenExperiment.build_model(changed, facts)
        shape = (2, 30) if parts == 1 else (2, 2, 30)
        mask = torch.ones(shape, dtype=torch.bool)
        mask[0, ..., 20:] = False
        loss = torch.nn.functional.cross_entropy(model(torch.randint(15, shape), mask), torch.tensor([0, 1]))
        (loss + auxiliary_loss(model)).backward()
        assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
