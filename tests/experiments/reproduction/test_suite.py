"""Suites: every shipped one is complete, and a wrong one is refused with one line."""

from __future__ import annotations

import pytest
import yaml

from kernel_attention.errors import InputError
from kernel_attention.experiments.reproduction.suite import Cell, Suite, list_suites, read_suite
from kernel_attention.experiments.training.recipe import list_recipes

SMALL = {
    "title": "Two rows",
    "source": "none",
    "records": "small",
    "columns": {"vowels": "demo", "waves": "uea/japanese_vowels"},
    "rows": {"softmax": {"attention": "softmax"}, "primal": {"attention": {"primal": {"rank": 3}}}},
    "keys": {"epochs": 2},
    "column_keys": {"waves": {"batch_size": 5}},
    "seeds": [0, 4],
    "baselines": {"default": "softmax"},
    "reported": {"primal": {"waves": [98.1, 0.2]}},
}


@pytest.mark.parametrize("name", list_suites())
def test_every_shipped_suite_has_recipes_that_build(name):
    suite = read_suite(name)
    assert suite.name == name
    for cell in suite.cells():
        recipe_name, recipe = suite.recipe(cell)
        assert recipe_name in list_recipes()
        assert recipe.seeds == [cell.seed]


def test_suites_are_no_recipes():
    assert list_suites()
    assert not [name for name in list_recipes() if name.startswith("suites/")]


def test_cells_have_the_keys_of_suite_column_and_row():
    suite = Suite(name="small", **SMALL)
    cells = list(suite.cells())
    assert len(cells) == 8
    assert {cell.seed for cell in cells[:4]} == {0}, "the first seed of every cell comes first"
    _, recipe = suite.recipe(Cell("primal", "waves", 4))
    assert (recipe.epochs, recipe.batch_size, recipe.seeds) == (2, 5, [4])
    assert recipe.attention == {"primal": {"rank": 3}}
    assert suite.recipe(Cell("primal", "vowels", 4))[1].batch_size != 5
    assert [suite.baseline(row) for row in suite.rows] == [None, "softmax"]
    assert list(suite.cells(["primal"], ["waves"], [7])) == [Cell("primal", "waves", 7)]


def test_plans_of_attacks_by_row():
    suite = Suite(name="small", **SMALL | {"attack": ["table", {"paper": ["primal"]}]})
    assert suite.attack_plans("softmax") == ["table"]
    assert suite.attack_plans("primal") == ["table", "paper"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": {}}, "has no rows"),
        ({"columns": {}}, "has no columns"),
        ({"rows": {"a/b": {}}}, "row 'a/b'"),
        ({"seeds": [1, 1]}, "seeds"),
        ({"baselines": {"primal": "softmx"}}, "softmx"),
        ({"reported": {"primal": {"nowhere": 1.0}}}, "nowhere"),
        ({"column_keys": {"nowhere": {}}}, "nowhere"),
        ({"attack": [{"paper": ["sofmax"]}]}, "sofmax"),
        ({"attack": ["transfer"]}, "needs the key transfer_from"),
        ({"transfer_from": "sofmax"}, "sofmax"),
        ({"tilte": "x"}, "tilte"),
        ({"title": None}, "title"),
    ],
)
def test_wrong_suites(changes, message, tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump(SMALL | changes))
    with pytest.raises(InputError, match=message) as raised:
        read_suite(str(path))
    assert "\n" not in str(raised.value)


def test_a_suite_without_a_needed_key(tmp_path):
    path = tmp_path / "small.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in SMALL.items() if key != "records"}))
    with pytest.raises(InputError, match="has no key records"):
        read_suite(str(path))


def test_unknown_names():
    with pytest.raises(InputError, match="cifar10_robustness"):
        read_suite("cifar10_robustnes")
    suite = Suite(name="small", **SMALL)
    with pytest.raises(InputError, match="row of suite small"):
        list(suite.cells(rows=["nothing"]))
    with pytest.raises(InputError, match="column of suite small"):
        list(suite.cells(columns=["nothing"]))
