"""A record is of its recipe, by name and version, and of the keys that its suite sets; of nothing else."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from suite_records import suite_record, write_suite_record

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import Cell, Places, ResultRecord, Suite, find_state, read_suite
from kernel_attention_lab.evidence.findings import suite_records
from kernel_attention_lab.evidence.suite import list_suites
from kernel_attention_lab.runs import read_recipe
from kernel_attention_lab.tasks import make_recipe
from kernel_attention_lab.tasks.registry import recipe_class, task_names

pytestmark = pytest.mark.usefixtures("mixer")  # the plugin of the suite places

COMMITTED = Places(Path("runs"), Path(__file__).parents[3] / "results")
CHANGED = {
    "embed_dim": 96, "num_heads": 6, "feedforward_dim": 77, "dropout": 0.35, "norm_first": True,
    "batch_size": 13, "optimizer": "adamw", "learning_rate": 0.123, "weight_decay": 0.07,
    "gradient_clip": 0.5, "auxiliary_reduction": "mean", "epochs": 3, "steps": 7, "evaluate_every": 5,
}  # fmt: skip
MACHINE = ("precision", "accelerator", "threads", "loggers", "plugins", "seeds", "task", "start_from")


def committed() -> Iterator[tuple[Suite, Cell, ResultRecord]]:
    """Every record of the repository that belongs to a suite, under the protocols that have been run."""
    for name in list_suites():
        shipped = read_suite(name)
        for suite in (shipped, shipped.with_protocol("paper")):
            for row, columns in suite_records(suite, COMMITTED).items():
                for column, seeds in columns.items():
                    yield from ((suite, Cell(row, column, seed), each) for seed, each in seeds.items())


def change_default(patch: pytest.MonkeyPatch, kind: type, name: str, value: Any) -> None:
    """Give a field of a class of recipes another default, as an edit of its line would."""
    defaults = inspect.signature(kind.__init__).parameters.values()
    patch.setattr(
        kind.__init__,
        "__defaults__",
        tuple(
            value if each.name == name else each.default
            for each in defaults
            if each.default is not each.empty
        ),
    )


def test_changed_defaults_make_no_record_stale(monkeypatch):
    changes = 0
    for kind in map(recipe_class, task_names()):
        for name, value in CHANGED.items():
            if name in {field.name for field in dataclasses.fields(kind)}:
                change_default(monkeypatch, kind, name, value)
                changes += 1
    assert changes >= 10 * len(task_names())
    assert make_recipe({"dataset": "any"}).learning_rate == 0.123
    count = sum(not find_state(suite, cell, COMMITTED).training for suite, cell, _ in committed())
    assert count >= 1000


def test_files_of_recipes_whose_keys_have_changed_have_a_higher_version():
    """This says when to raise ``version`` in a recipe's file."""
    recipes: dict[tuple[str, str, str], tuple[str, dict[str, Any]]] = {}
    for suite, cell, record in committed():
        place = (suite.name, cell.row, cell.column)
        if place not in recipes:
            name, recipe = suite.recipe(cell)
            recipes[place] = name, recipe.keys()
        (name, resolved), own = recipes[place], suite.keys_of(cell)
        for key in read_recipe(name)[1].keys() - own.keys() - set(MACHINE):
            assert record.config.get(key) == resolved[key], (
                f"recipe {name} sets {key}={resolved[key]!r}, and record {record.file_name} of suite "
                f"{suite.name} was made with {record.config.get(key)!r}: raise version in the recipe's file"
            )


@pytest.fixture
def small() -> Suite:
    return Suite(
        name="small", title="Small", source="none", records="small", columns={"demo": "demo"},
        rows={"softmax": {"attention": "softmax"}}, keys={"epochs": 2, "learning_rate": 0.02, "threads": 1},
    )  # fmt: skip


CELL = Cell("softmax", "demo", 0)


def is_fresh(suite: Suite, root: Path, **fields: Any) -> bool:
    """Whether a record is taken; its ``fields`` are other than the suite would make them."""
    write_suite_record(root, suite, *CELL, **fields)
    return not find_state(suite, CELL, Places(root / "runs", root / "results")).training


def test_a_record_of_the_same_keys_is_taken(small, tmp_path):
    figures: dict[str, Any] = {"figures": {"evaluation": {}}}
    assert is_fresh(small, tmp_path / "early", **figures), "early records hold no names of keys"
    assert is_fresh(small, tmp_path / "new", **figures, keys=["attention", "epochs", "learning_rate"])
    elsewhere = {"threads": 4, "accelerator": "gpu", "dropout": 0.9, "a_key_of_another_version": 1}
    assert is_fresh(small, tmp_path / "elsewhere", **figures, config=elsewhere)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"config": {"epochs": 3}}, "made with epochs=3, suite small has 2"),
        ({"config": {"attention": {"softmax": {"dropout": 0.5}}}}, "attention=.*suite small has 'softmax'"),
        ({"config": {"batch_size": 3}, "keys": ["batch_size"]}, "batch_size=3"),
        ({"config": {"version": 2}}, "version=2, suite small has 1"),
        ({"recipe": "other"}, "recipe 'other', suite small has 'demo'"),
    ],
)
def test_a_record_of_other_keys_is_refused(small, tmp_path, fields, message):
    """A key that the suite set once and sets no more counts too, and so do a recipe's version and name."""
    with pytest.raises(InputError, match=message):
        is_fresh(small, tmp_path, **fields, figures={"evaluation": {}})


def test_a_suite_that_sets_another_key_finds_its_record_stale(small, tmp_path):
    assert is_fresh(small, tmp_path, figures={"evaluation": {}}, keys=sorted(small.keys_of(CELL)))
    other = dataclasses.replace(small, keys=small.keys | {"dropout": 0.77})
    with pytest.raises(InputError, match=r"suite small has 0\.77"):
        find_state(other, CELL, Places(tmp_path / "runs", tmp_path / "results"))


def test_a_recipe_in_a_file_may_lie_elsewhere(small, tmp_path):
    own = tmp_path / "mine.yaml"
    own.write_text("dataset: JapaneseVowels\nversion: 3\n")
    suite = dataclasses.replace(small, columns={"demo": str(own)})
    figures = {"evaluation": {}}
    record = suite_record(suite, *CELL, figures=figures)
    assert record.config["version"] == 3
    assert is_fresh(suite, tmp_path, recipe="/elsewhere/mine.yaml", figures=figures)
