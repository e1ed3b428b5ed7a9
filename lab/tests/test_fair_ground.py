"""The map on fair ground has the rates that its search chose; kernel machines name real tests."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kernel_attention_lab.evidence import Cell, Places, ResultRecord, read_suite
from kernel_attention_lab.evidence.findings import suite_records
from kernel_attention_lab.plain_yaml import read_yaml

ROOT = Path(__file__).parents[2]
PAIRS = [("fair_ground", "fair_ground_search"), ("fair_recall", "fair_recall_search")]


def best(record: ResultRecord) -> tuple[float, float]:
    """The best validation accuracy of a training, and the negative loss there."""
    course = record.figures["course"]
    return max(zip(course["val_accuracy"], (-loss for loss in course["val_loss"]), strict=True))


@pytest.mark.parametrize(("suite", "search"), PAIRS)
def test_the_suite_has_the_rates_that_the_search_chose(suite, search):
    """Of the records in this repository, where all four rates were tried."""
    kept, searched = read_suite(suite), read_suite(search)
    tried: dict[tuple[str, str], dict[float, tuple[float, float]]] = {}
    for name, cells in suite_records(searched, Places(ROOT / "runs", ROOT / "results")).items():
        row, _, rate = name.rpartition("_")
        for column, by_seed in cells.items():
            for record in by_seed.values():
                tried.setdefault((row, column), {})[float(rate)] = best(record)
    for (row, column), by_rate in tried.items():
        if len(by_rate) == 4:
            assert kept.recipe(Cell(row, column, 0))[1].learning_rate == max(by_rate, key=by_rate.__getitem__)


@pytest.mark.parametrize(("suite", "search"), PAIRS)
def test_search_and_suite_differ_in_lengths_steps_and_rate_alone(suite, search):
    kept, searched = read_suite(suite), read_suite(search)
    allowed = {"train_at", "test_at", "steps", "evaluate_every", "learning_rate", "seeds", "batch_size"}
    for cell in searched.cells():
        row, rate = cell.row.rsplit("_", 1)
        ours, theirs = (
            each.keys() for each in (searched.recipe(cell)[1], kept.recipe(Cell(row, cell.column, 0))[1])
        )
        assert {key for key in ours if ours[key] != theirs[key]} <= allowed
        assert ours["learning_rate"] == float(rate)


def test_every_row_of_the_kernel_machines_names_a_test_that_is_there():
    (region,) = read_yaml(ROOT / "docs/tables/kernel-machines.yaml")["regions"]
    assert len(region["sources"]) >= 10
    for source in region["sources"]:
        path, _, name = source["with"]["test"].partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}, source
