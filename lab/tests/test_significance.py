"""The page of significance: suites of the same rows are one comparison over all their data sets."""

from __future__ import annotations

from pathlib import Path

import pytest
from declared import draw
from suite_records import write_suite_record

from kernel_attention_lab.evidence import read_suite

ROOT = Path(__file__).parents[2]
PAGE = "docs/significance.md"
NOTHING = ["", "No two rows of a suite have been measured on two common data sets yet.", ""]
FIRST = ("JapaneseVowels", "Handwriting")
MORE = ("BasicMotions", "FingerMovements", "AtrialFibrillation", "LSST", "Libras")


def write(root, suite_name, row, column, accuracy):
    figures = {"evaluation": {"accuracy": accuracy}}
    write_suite_record(root, read_suite(suite_name), row, column, figures=figures)


def measured(root, more=MORE, rows=("batch_norm", "scaled_heads")):
    """batch_norm is better than softmax on every set, the other row on every second."""
    for number, column in enumerate((*FIRST, *more)):
        suite = "primal_dual_uea" if column in FIRST else "primal_dual_uea_more"
        figures = {"softmax": 0.5, "batch_norm": 0.6, "scaled_heads": 0.5 + 0.01 * (-1) ** number}
        for row in ("softmax", *rows):
            write(root, suite, row, column, figures[row])


def section(root):
    return draw(PAGE, root)[0]["significance"]


def test_two_tables_of_a_paper_are_one_comparison(tmp_path):
    """Seven sets: p = 2^-6 for the row that is better on all, twice that after Holm."""
    measured(tmp_path)
    lines = section(tmp_path)
    assert [line for line in lines if line.startswith("* ")] == [
        "* batch_norm is better than softmax over the sets (better on 7, worse on 0 of 7; p = 0.031).",
        "* No difference found between scaled_heads and softmax over the sets (better on 4, worse on 3 of 7; "
        "p = 1).",
    ]
    assert len([line for line in lines if line.startswith("### ")]) == 1
    text = "\n".join(lines)
    assert "reproduction.md#primal_dual_uea)" in text
    assert "reproduction.md#primal_dual_uea_more)" in text
    assert "| `batch_norm` | `softmax` | 7 | 7 | 0 | +10.00 | 0.016 | 0.031 | better |" in lines
    assert "protocol holdout" in text


@pytest.mark.parametrize(("rows", "needed"), [(("batch_norm",), 6), (("batch_norm", "scaled_heads"), 7)])
def test_five_sets_are_too_few(tmp_path, rows, needed):
    measured(tmp_path, MORE[:3], rows)
    lines = section(tmp_path)
    made = "one comparison needs" if len(rows) == 1 else "2 comparisons need"
    assert (
        f"* Too few sets to test batch_norm against softmax (better on 5, worse on 0 of 5; {made} {needed})."
        in lines
    )
    assert any(line.endswith("| too few sets to test |") for line in lines)
    assert not any("No difference" in line for line in lines)


def test_one_set_is_no_comparison(tmp_path):
    write(tmp_path, "primal_dual_uea", "softmax", "Handwriting", 0.5)
    write(tmp_path, "primal_dual_uea", "batch_norm", "Handwriting", 0.6)
    assert section(tmp_path) == NOTHING
    assert section(tmp_path / "none") == NOTHING


def test_a_smaller_error_is_better(tmp_path):
    suite = read_suite("primal_dual_regression")
    for column in suite.columns:
        for row, value in (("softmax", 40.0), ("batch_norm", 30.0)):
            figures = {"evaluation": {suite.metric: value}}
            write_suite_record(tmp_path, suite, row, column, figures=figures)
    lines = section(tmp_path)
    assert any(
        "batch_norm is better than softmax over the sets (better on 6, worse on 0" in line for line in lines
    )
