"""The page of abilities is what the records say; the suite's models can be trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from declared import NOT_YET, draw, rows_of
from suite_records import suite_record

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import Cell, ResultRecord, read_suite, write_records
from kernel_attention_lab.tasks.sequence_labels import PositionExperiment

ROOT = Path(__file__).parents[2]
PAGE = "docs/abilities.md"
SUITE = read_suite("abilities")


def record(label: str, seed: int, column: str, accuracies: list[float], **config) -> ResultRecord:
    _, recipe = SUITE.recipe(Cell(label, column, seed))
    figures = {f"accuracy_{name}": value for name, value in zip(recipe.test_tasks(), accuracies, strict=True)}
    return suite_record(
        SUITE, label, column, seed, config=config,
        budget={"steps": recipe.steps, "seconds": 100.0 + seed, "threads": 1},
        figures={"evaluation": {"accuracy": float(np.mean(accuracies))} | figures},
    )  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """Two mechanisms of associative recall, two seeds of one of them, and one of parity."""
    write_records(
        [
            record("softmax", 0, "mqar", [1.0, 1.0, 0.9, 0.5]),
            record("softmax", 1, "mqar", [1.0, 0.9, 0.9, 0.6]),
            record("linear", 0, "mqar", [0.8, 0.4, 0.2, 0.1]),
        ],
        tmp_path / "results/abilities/mqar",
    )
    write_records(
        [record("linear", 0, "parity", [1.0, 0.5, 0.5, 0.5])], tmp_path / "results/abilities/parity"
    )
    return tmp_path


def test_the_tables(root):
    regions, _ = draw(PAGE, root)
    assert "3 models, 100 to 101 s of training each, x86_64" in regions["mqar"][1]
    assert rows_of(regions["mqar"]) == [
        ["mechanism", "seeds", "length 64, items 4", "length 128, items 8", "length 256, items 16",
         "length 512, items 64"],
        ["`softmax`", "2", "100.0 ± 0.0", "95.0 ± 7.1", "90.0 ± 0.0", "55.0 ± 7.1"],
        ["`linear`", "1", "80.0", "40.0", "20.0", "10.0"],
    ]  # fmt: skip
    assert rows_of(regions["abilities-map"])[1:] == [
        ["`softmax`", "2", "85.0 ± 0.0", "", "", "", "", "", "", ""],
        ["`linear`", "1", "37.5", "", "", "", "", "", "62.5", ""],
    ]
    assert regions["majority"] == NOT_YET


def test_records_that_do_not_belong_together_are_refused(root):
    folder = root / "results/abilities/mqar"
    write_records([record("sparse", 0, "mqar", [0.1] * 4, learning_rate=0.5)], folder)
    with pytest.raises(InputError, match="differ in learning_rate"):
        draw(PAGE, root)
    (folder / "sparse-0.json").write_text(
        (folder / "linear-0.json").read_text().replace('"label": "linear"', '"label": "cosine"')
    )
    (folder / "sparse-0.json").rename(folder / "cosine-0.json")
    with pytest.raises(InputError, match="suite abilities has no row cosine"):
        draw(PAGE, root)


@pytest.mark.parametrize("column", SUITE.columns)
def test_every_column_of_the_suite_has_a_model_for_this_machine(column):
    _, recipe = SUITE.recipe(Cell("softmax", column, 0))
    PositionExperiment(recipe).check()
