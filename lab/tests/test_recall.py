"""The curve of associative recall is what the records say; every row of its suite can be trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from declared import draw, rows_of
from suite_records import write_suite_record
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention_lab.data.texts.text import IGNORED
from kernel_attention_lab.evidence import Cell, read_suite
from kernel_attention_lab.evidence.observations import state_size
from kernel_attention_lab.tasks.sequence_labels import PositionExperiment

PAGE, FIGURE = "docs/concepts/low-rank-attention.md", Path("docs/figures/recall.svg")
SUITE = read_suite("recall")


def write(root, row: str, column: str, seed: int, accuracy: float, **config) -> None:
    figures = {"evaluation": {"accuracy": accuracy}}
    write_suite_record(root, SUITE, row, column, seed, config=config, figures=figures)


def test_the_table_has_states_and_accuracies(tmp_path):
    write(tmp_path, "softmax", "pairs_4", 0, 1.0)
    write(tmp_path, "values_8", "pairs_4", 0, 0.9)
    write(tmp_path, "values_8", "pairs_4", 1, 0.7)
    write(tmp_path, "values_8", "pairs_8", 0, 0.5)
    regions, figures = draw(PAGE, tmp_path)
    assert rows_of(regions["recall"]) == [
        ["row", "state", "seeds", "pairs 2", "pairs 4", "pairs 8", "pairs 16"],
        ["`softmax`", "8,192", "1", "", "100.0", "", ""],
        ["`values_8`", "512", "2", "", "80.0 ± 14.1", "50.0 (seed 0)", ""],
    ]
    assert figures[FIGURE].startswith("<?xml")
    write(tmp_path, "linear", "pairs_2", 0, 0.1, learning_rate=0.5)
    with pytest.raises(InputError, match="differ in learning_rate"):
        draw(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("heads", "row"), [(4, "values_16"), (8, "values_8"), (16, "values_4"), (2, "values_32")]
)
def test_linear_attention_stands_beside_each_rank_with_as_large_a_state(heads, row):
    """d^2 / h and s d numbers; linear attention keeps the d sums of its keys' features beside them."""
    linear = "linear" if heads == 2 else f"linear_{heads}_heads"
    assert state_size(SUITE, linear) - 64 == state_size(SUITE, row) == 64**2 // heads


@pytest.mark.parametrize("row", SUITE.rows)
def test_every_row_trains(row):
    _, recipe = SUITE.recipe(Cell(row, "pairs_8", 0))
    experiment = PositionExperiment(recipe)
    torch.manual_seed(0)
    model = experiment.build_model(recipe, experiment.facts())
    inputs, targets = recipe.train_tasks()[0].batch(2, np.random.default_rng(0))
    labelled = targets != IGNORED
    F.cross_entropy(model.logits_at(inputs, labelled), targets[labelled]).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
