"""The page of results has no figure of its own: all of them follow from records."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from declared import draw, rows_of
from suite_records import write_suite_record

from kernel_attention_lab.evidence import read_suite

ROOT = Path(__file__).parents[2]
PAGE = "docs/results.md"
REGION = re.compile(r"<!-- ([\w-]+): begin \(make results\) -->\n.*?<!-- \1: end -->", re.DOTALL)


def write(root, suite, row, column, seed, **figures):
    """A record of a suite's cell with these figures."""
    write_suite_record(
        root, suite, row, column, seed, budget={"seconds": 60.0}, software={"torch": "2.13.0"},
        machine="x86_64, 2 cores", revision="0123456789abcdef", figures={"evaluation": figures},
    )  # fmt: skip


@pytest.fixture
def root(tmp_path):
    """Two seeds of the demo, one of softmax on another set, sentences clean and swapped, a perplexity."""
    every, sentences = read_suite("every_mechanism"), read_suite("kernel_pca_sst2")
    write(tmp_path, every, "primal", "JapaneseVowels", 0, accuracy=0.96)
    write(tmp_path, every, "primal", "JapaneseVowels", 1, accuracy=0.98)
    write(tmp_path, every, "primal", "BasicMotions", 0, accuracy=0.9)
    write(tmp_path, every, "softmax", "BasicMotions", 2, accuracy=0.95)
    write(tmp_path, sentences, "rpc", "SST-2", 0, accuracy=0.801, swapped_accuracy=0.7654)
    write(tmp_path, read_suite("kernel_pca_ptb"), "symmetric", "PTB", 0, perplexity=131.26)
    write(
        tmp_path,
        read_suite("primal_dual_uea").with_protocol("paper"),
        "softmax",
        "Handwriting",
        0,
        accuracy=0.3,
    )
    return tmp_path


def test_the_page_has_every_region_and_no_figure_outside(tmp_path):
    """No table but the one of the other pages, and no share in per cent that was measured."""
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    assert set(REGION.findall(page)) == set(draw(PAGE, tmp_path)[0])
    typed = REGION.sub("", page)
    figures = re.findall(r"\d\.\d|\d ± \d|\d(?:\.\d+)? %", typed)
    assert figures == ["0 %"], "one tenth of the words is a setting: 10 %"
    links = [line for line in typed.splitlines() if line.startswith("| ") and "](" not in line]
    assert links == ["| what | where |"]


def test_without_records_nothing_is_claimed(tmp_path):
    regions, figures = draw(PAGE, tmp_path)
    assert figures == {}
    assert regions["demo"] == ["", "No record of it yet.", ""]
    for mark in ("every-mechanism", "uea", "thesis", "sentences", "language"):
        said = [line for line in regions[mark] if line]
        assert said
        assert all("no record yet" in line and "`kernel-attention reproduce " in line for line in said)


def test_the_tables_have_what_the_records_say(root):
    regions, _ = draw(PAGE, root)
    assert regions["demo"] == ["", "Test accuracy, %: 97.00 ± 1.41 (seeds 0, 1).", ""]
    lines = regions["every-mechanism"]
    assert "(reproduction.md#every_mechanism)), protocol `holdout`, 4 of 84 models:" in lines[1]
    assert rows_of(lines)[:3] == [
        ["row", "seeds", "JapaneseVowels: accuracy, %", "BasicMotions: accuracy, %"],
        ["`softmax`", "1", "", "95.00"],
        ["`primal`", "2", "97.00 ± 1.41", "90.00 (seed 0)"],
    ]
    assert rows_of(lines)[4] == ["x86_64, 2 cores", "0123456789ab", "2.13.0", "4", "2026-11-22", "4 min 00 s"]
    assert rows_of(regions["sentences"])[:2] == [
        ["row", "seeds", "SST-2: accuracy, %", "SST-2: swapped accuracy, %"],
        ["`rpc`", "1", "80.10", "76.54"],
    ]
    assert rows_of(regions["language"])[:2] == [
        ["row", "seeds", "PTB: perplexity"],
        ["`symmetric`", "1", "131.26"],
    ]
    uea = "\n".join(regions["uea"])
    assert "primal_dual_uea-paper), protocol `paper`, 1 of 120 models:" in uea.replace("))", ")")
    assert "`kernel-attention reproduce primal_attention_uea` makes them" in uea


def test_several_sets_have_a_table_for_each_figure(tmp_path):
    uea = read_suite("primal_dual_uea")
    write(tmp_path, uea, "softmax", "Handwriting", 0, accuracy=0.3, head_distance=0.4)
    write(tmp_path, uea, "softmax", "JapaneseVowels", 0, accuracy=0.98)
    lines = draw(PAGE, tmp_path)[0]["uea"]
    assert [line for line in lines if line.endswith(":") and "suite" not in line] == [
        "Accuracy, %:",
        "Head distance:",
    ]
    assert rows_of(lines)[:4] == [
        ["row", "seeds", "Handwriting", "JapaneseVowels"],
        ["`softmax`", "1", "30.00", "98.00"],
        ["row", "seeds", "Handwriting"],
        ["`softmax`", "1", "0.40"],
    ]
