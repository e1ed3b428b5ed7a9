"""The recipes of the KMLSVD thesis, and the contenders in their suites: its sizes and protocols."""

from __future__ import annotations

import re

import pytest

from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.evidence import read_suite
from kernel_attention_lab.runs import list_recipes, recipe_text
from kernel_attention_lab.tasks import Recipe
from kernel_attention_lab.tasks.registry import build_model
from kernel_attention_lab.tasks.time_series import divide_test

NAMES = [name for name in list_recipes() if name.startswith("kmlsvd/")]
FACTS = {"num_features": 3, "max_len": 12, "class_names": ["a", "b"]}
# Equations 4-3, 4-6 and 4-7, without the diagonal of 4-6, which a layer has where eta > 0. Thesis, table 4-5:
# 1988, 1967 (7 of them that diagonal), 2352.
EQUAL_BUDGET = {"multilinear": 1988, "primal": 2 * 28 * 7 + 2 * 28**2, "softmax": 3 * 28**2}
# The same equations at M = 20, R = 5 (equation 4-8).
EQUAL_DIMENSION = {
    "multilinear": 4 * 5**3 + 3 * 20 * 5 + 3 * 20**2 + 20**3 // 4**2,
    "primal": 2 * 20 * 5 + 2 * 20**2,
    "softmax": 3 * 20**2,
}


def weights_of_the_last_layer(recipe: Recipe) -> int:
    """The numbers that the thesis counts: no biases, no output maps."""
    layer = build_model(recipe, FACTS).encoder.layers[-1].attention
    uncounted = ("bias", "out_proj", "concat", "sqrt_lambda")
    return sum(
        p.numel() for name, p in layer.named_parameters() if not any(part in name for part in uncounted)
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_are_of_the_protocols_of_the_thesis(name):
    expected = {"flt": ["1"], "llt": ["1", "3"], "dimension": ["3"]}[name.rpartition("_")[2]]
    assert re.findall(r"[\d.]+ with --protocol thesis-(\d)", recipe_text(name)) == expected


@pytest.mark.parametrize(
    ("name", "counts"), [("equal_budget", EQUAL_BUDGET), ("equal_dimension", EQUAL_DIMENSION)]
)
def test_the_contenders_of_test_3_have_the_numbers_of_parameters_of_the_thesis(name, counts):
    suite = read_suite(f"multilinear_{name}")
    assert suite.protocol == "thesis-3"
    assert set(suite.rows) == set(counts)
    for cell in suite.cells(seeds=[0]):
        recipe = suite.recipe(cell)[1]
        assert recipe.attention_name().endswith(cell.row)
        assert weights_of_the_last_layer(recipe) == counts[cell.row], cell


def test_the_last_fifth_of_japanese_vowels_holds_two_classes():
    first, last = divide_test(load_time_series("JapaneseVowels"))
    assert (len(first), len(last)) == (296, 74)
    assert set(last.targets) == {7, 8}
    for name in ("llt", "equal_dimension"):
        header = recipe_text(f"kmlsvd/japanese_vowels_{name}")
        assert "its last 20 % hold two of the nine classes" in header
