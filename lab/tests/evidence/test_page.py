"""The page of a suite, from records whose figures are known. Nothing is trained."""

from __future__ import annotations

from html.parser import HTMLParser

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import Places, ResultRecord, Suite, find, write_page, write_records
from kernel_attention_lab.evidence.suite_page import (
    comparison_tables,
    figure_tables,
    finding_lines,
    missing_lines,
    suite_page,
)
from kernel_attention_lab.packing import pack_bits

COLUMNS = {f"set{at}": "demo" for at in range(6)}
ROWS = ("softmax", "linear", "same")


def suite(**changes):
    content = {
        "title": "Three rows <b>on six sets</b>",
        "source": "a paper, table 1",
        "records": "small",
        "protocol": "holdout",
        "reported_protocol": "paper",
        "columns": COLUMNS,
        "rows": {row: {"attention": row if row != "same" else "softmax"} for row in ROWS},
        "seeds": [0, 1],
        "baselines": {"default": "softmax"},
        "reported": {"softmax": {"set0": [61.0, 0.5]}, "linear": {"set0": 50.0, "set1": 70.25}},
        "remarks": ["The sets are imaginary"],
    }
    return Suite(name="small", **content | changes)


def record(row, seed, right, cases=40, **figures):
    """A record with the first ``right`` of the cases right."""
    evaluation = {
        "accuracy": right / cases,
        "loss": 1 - right / cases,
        "cases": cases,
        "correct_bits": pack_bits(np.arange(cases) < right),
    }
    return ResultRecord(
        label=row, seed=seed, recipe="demo", config={"attention": row, "protocol": "holdout"},
        budget={"epochs": 3, "seconds": 90.0, "threads": 1}, software={"torch": "2.13.0"},
        machine="x86_64, 2 cores", date=f"2026-11-2{seed}T05:00:00+00:00", revision="0123abcdef0123abcdef",
        figures={"evaluation": evaluation | figures},
    )  # fmt: skip


def places(tmp_path, records, made=None):
    """The records by (column, row, seed, right), as ``reproduce`` leaves them."""
    found = Places(tmp_path / "runs", tmp_path / "results")
    for column, row, seed, right in records:
        path = tmp_path / "results" / (made or suite()).records / column
        write_records([record(row, seed, right)], path)
    return found


def full():
    """linear has more right in every set, 20 in set0; same has what softmax has."""
    for at, column in enumerate(COLUMNS):
        for seed in (0, 1):
            yield column, "softmax", seed, 20 + seed
            yield column, "same", seed, 20 + seed
            yield column, "linear", seed, 40 if at == 0 else 21 + seed


def rows(table):
    return [list(row) for row in table.rows]


def test_reported_beside_measured(tmp_path):
    (table,) = figure_tables(find(suite(), places(tmp_path, full())))
    assert table.head == ["column", "row", "reported, %", "measured, %", "seeds", "difference"]
    found = {(row[0], row[1]): row[2:] for row in rows(table)}
    assert found["set0", "softmax"] == ["61.00 ± 0.50", "51.25 ± 1.77", "2", "−9.75"]
    assert found["set0", "linear"] == ["50.00", "100.00 ± 0.00", "2", "+50.00"]
    assert found["set1", "linear"] == ["70.25", "53.75 ± 1.77", "2", "−16.50"]
    assert found["set2", "same"] == ["–", "51.25 ± 1.77", "2", "–"]


def test_the_comparisons(tmp_path):
    found = find(suite(), places(tmp_path, full()))
    columns, cases = comparison_tables(found)
    over = {row[0]: row[1:] for row in rows(columns)}
    # Six differences of one sign: p = 2 / 2^6, twice that after Holm. 0.475 in set0 and 0.025 in five sets.
    assert over["linear"] == ["softmax", "6", "6", "0", "+10.21", "0.031", "0.062", "too few columns to test"]
    assert over["same"] == ["softmax", "6", "0", "0", "+0.00", "1", "1", "too few columns to test"]
    assert len(cases.rows) == 12
    on = {(row[0], row[2]): row[3:] for row in rows(cases)}
    assert on["linear", "set0"][0:2] == ["2", "+48.75"]
    assert on["linear", "set0"][-1] == "better", "20 and 19 cases more, of 40"
    assert on["linear", "set1"][-1] == on["same", "set0"][-1] == "no difference found"


def test_the_sentences(tmp_path):
    lines = finding_lines(find(suite(), places(tmp_path, full())))
    assert lines[0] == (
        "Too few columns to test linear against softmax (better on 6, worse on 0 of 6; 2 comparisons need 7)."
    )
    assert lines[1].startswith("Too few columns to test same against softmax (better on 0, worse on 0 of 6;")
    assert lines[2] == "linear is better than softmax on the cases of set0 (p < 0.0001)."
    assert lines[3] == "No difference found in 11 of 12 comparisons on the cases of one column."
    assert finding_lines(find(suite(), places(tmp_path / "none", []))) == ["No cell has a record yet."]


def test_what_is_missing(tmp_path):
    some = [each for each in full() if each[1] == "softmax"][:3]
    found = find(suite(), places(tmp_path, some))
    assert missing_lines(found) == [
        "set2, set3, set4, set5: every row and seed.",
        "softmax: set1 (seed 1).",
        "linear, same: set0 (seeds 0, 1); set1 (seeds 0, 1).",
    ]
    assert finding_lines(found) == ["No row can be compared with its baseline yet."]
    assert missing_lines(find(suite(), places(tmp_path, full()))) == ["Every cell has a record."]


def test_records_without_bits_are_compared_over_the_columns_alone(tmp_path):
    found = places(tmp_path, full())
    for path in tmp_path.rglob("*.json"):
        text = path.read_text()
        path.write_text(
            "\n".join(line for line in text.splitlines() if "correct_bits" not in line).replace(
                '"cases": 40,\n', '"cases": 40\n'
            )
        )
    tables = comparison_tables(find(suite(), found))
    assert len(tables) == 1
    assert tables[0].caption.startswith("Over the columns")


def test_further_figures_have_tables_of_their_own(tmp_path):
    made = suite(further={"swapped_accuracy": {"softmax": {"set0": 40.0}}})
    path = tmp_path / "results" / "small" / "set0"
    write_records([record("softmax", 0, 30, swapped_accuracy=0.5)], path)
    first, second = figure_tables(find(made, Places(tmp_path / "runs", tmp_path / "results")))
    assert first.caption.startswith("Accuracy.")
    assert rows(second) == [["set0", "softmax", "40.00", "50.00", "1", "+10.00"]]


class _Reader(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text = [], []

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.filterwarnings("error")
def test_the_page_stands_alone(tmp_path):
    found = places(tmp_path, full())
    path = write_page(find(suite(), found), found)
    assert path == tmp_path / "runs" / "small" / "report.html"
    reader = _Reader()
    reader.feed(path.read_text("utf-8"))
    text = " ".join(" ".join(reader.text).split())
    assert "Three rows <b>on six sets</b>" in text, "text of a suite is no HTML"
    for said in (
        "The sets are imaginary.",
        "a paper, table 1",
        "no difference found",
        "0123abcdef01",
        "36 of 36",
    ):
        assert said in text
    assert [tag for tag, _ in reader.tags if tag in ("script", "link", "iframe")] == []
    sources = [attributes["src"] for tag, attributes in reader.tags if tag == "img"]
    assert len(sources) == 1, "the critical-difference diagram"
    assert sources[0].startswith("data:image/")
    assert suite_page(find(suite(), found)) == path.read_text("utf-8"), "the same records give the same page"


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "runs").write_text("a file")
    found = places(tmp_path, [])
    with pytest.raises(InputError, match=r"page .*report\.html: cannot be written"):
        write_page(find(suite(), found), found)
