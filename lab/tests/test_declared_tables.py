"""A table or a figure of the documentation is one entry of YAML, and every declaration is a true one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT
from declared import NOT_YET, draw
from suite_records import write_suite_record

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import read_suite
from kernel_attention_lab.evidence.pages import declarations, generated_texts

ENTRY = """
page: docs/demo.md
regions:
- mark: sets
  source: {suite: every_mechanism}
  text: |
    {{ all | length }} models.

    {{ table }}

    {{ figure }}
  table:
    rows: row
    sort: {value: evaluation.accuracy}
    descending: true
    columns:
    - {title: mechanism, text: "`{{ row }}`"}
    - {each: column, value: evaluation.accuracy, as: spread .1p, if_empty: –}
  figure: {file: docs/figures/demo.svg, alt: Accuracies, line: row, x: column, y: evaluation.accuracy}
"""
PAGE = "# Demo\n\n<!-- sets: begin (make results) -->\n<!-- sets: end -->\n\nThe end.\n"


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder with a page, a declaration of its table, and three records."""
    suite = read_suite("every_mechanism")
    for row, seed, accuracy in (("softmax", 0, 0.9), ("softmax", 1, 0.8), ("primal", 0, 0.95)):
        figures = {"evaluation": {"accuracy": accuracy}}
        write_suite_record(tmp_path, suite, row, "JapaneseVowels", seed, figures=figures)
    (tmp_path / "docs/tables").mkdir(parents=True)
    (tmp_path / "docs/tables/demo.yaml").write_text(ENTRY, encoding="utf-8")
    (tmp_path / "docs/demo.md").write_text(PAGE, encoding="utf-8")
    return tmp_path


def test_one_entry_adds_a_table_and_a_figure_to_a_page(copy):
    texts = generated_texts(copy)
    assert texts[Path("docs/demo.md")] == PAGE.replace(
        "<!-- sets: end -->",
        "\n3 models.\n\n| mechanism | JapaneseVowels |\n|---|---|\n| `primal` | 95.0 |\n"
        "| `softmax` | 85.0 ± 7.1 |\n\n![Accuracies](figures/demo.svg)\n\n<!-- sets: end -->",
    )
    assert texts[Path("docs/figures/demo.svg")].startswith("<?xml")


@pytest.mark.parametrize(
    ("written", "read", "message"),
    [
        ("suite: every", "sweet: every", "unknown source 'sweet'"),
        ("as: spread", "as: spread_out", "unknown statistic 'spread_out'"),
        ("line: row", "kind: pie", "unknown kind of figure 'pie'"),
        ("suite: every_mechanism", "suite: no_suite", "unknown suite 'no_suite'"),
    ],
)
def test_a_mistyped_entry_is_refused(copy, written, read, message):
    path = copy / "docs/tables/demo.yaml"
    path.write_text(ENTRY.replace(written, read), encoding="utf-8")
    with pytest.raises(InputError, match=message):
        generated_texts(copy)


def test_a_mark_that_the_page_lacks_is_told(copy):
    (copy / "docs/demo.md").write_text("# Demo\n", encoding="utf-8")
    with pytest.raises(SystemExit, match="no lines with 'sets: begin'"):
        generated_texts(copy)


def test_every_column_of_a_declared_table_has_a_value():
    """An expression that no observation answers would be an empty column of the committed page."""
    for declared in declarations(ROOT):
        page, mark = (ROOT / declared["page"]).read_text(encoding="utf-8"), declared["mark"]
        text = re.search(rf"\b{mark}: begin\b.*?\n(.*?)\n[^\n]*\b{mark}: end\b", page, re.DOTALL)[1]
        tables = [each.splitlines() for each in text.split("\n\n") if each.startswith("| ")]
        for table in tables:
            cells = [
                [cell.strip() for cell in line[1:-1].split(" | ")] for line in table if "---" not in line
            ]
            for title, *column in zip(*cells, strict=True):
                assert any(column), (declared["page"], mark, title)


MEASURED = ("abilities", "control-results", "concepts/low-rank-attention", "diagnostics", "equal-time")
"""Pages all of whose regions are measured; others have some that follow from papers or from arithmetic."""


@pytest.mark.parametrize("page", MEASURED)
def test_without_records_nothing_is_claimed(page, tmp_path):
    regions, figures = draw(f"docs/{page}.md", tmp_path)
    assert figures == {}
    assert all(lines == NOT_YET for lines in regions.values())


def test_every_mark_of_a_page_is_declared():
    declared = [(each["page"], each["mark"]) for each in declarations(ROOT)]
    for page in {page for page, _ in declared}:
        text = (ROOT / page).read_text(encoding="utf-8")
        marks = re.findall(r"<!-- ([\w-]+): begin \(make results\) -->", text)
        assert set(marks) <= {mark for place, mark in declared if place == page}, page
