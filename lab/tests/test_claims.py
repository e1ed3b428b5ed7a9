"""The ledger of the papers' claims: every claim has a source that exists, and its verdict follows from it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml
from checkout import ROOT
from suite_records import suite_record

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence.claims import VERDICTS, Claim, judge, read_documents
from kernel_attention_lab.evidence.claims.claim import dead_sources
from kernel_attention_lab.evidence.claims.ledger import Difference, verdict_of
from kernel_attention_lab.evidence.suite import read_suite
from kernel_attention_lab.packing import pack_bits

DOCUMENTS = read_documents(ROOT / "docs" / "claims")
CLAIMS = [claim for document in DOCUMENTS for claim in document.claims]


def claim(**changes) -> Claim:
    given = {"id": "one", "where": "here", "kind": "sentence", "says": "It is so."}
    return Claim(**given | {"untested": "no data"} | changes)


def difference(mean: float, half: float, p_value: float = 0.01) -> Difference:
    return Difference("a − b", mean, mean - half, mean + half, p_value, 1.0, (3, "seeds"))


def no_records(suite):
    raise AssertionError("no record is asked for")


def test_the_five_documents_have_their_claims_with_a_summary_each():
    assert len(DOCUMENTS) == 5
    assert len(CLAIMS) > 80
    assert all(len(document.summary) == 5 for document in DOCUMENTS)


def test_every_test_record_row_and_page_that_a_claim_names_exists():
    assert {each.id: dead for each in CLAIMS if (dead := dead_sources(each, ROOT))} == {}


def test_a_name_that_does_not_exist_is_found():
    wrong = claim(untested="", tests=["tests/theorems/test_lanczos.py::test_no_such"], page="no_page.md")
    assert dead_sources(wrong, ROOT) == [*wrong.tests, "no_page.md"]
    rows = [{"suite": "kernel_pca_sst2", "rows": {"rpc": "symetric"}, "columns": ["SST-3"]}]
    assert len(dead_sources(claim(untested="", compare=rows), ROOT)) == 2
    bench = [{"bench": "lra", "contender": "3 x primal", "value": "1", "claimed": 1}]
    assert dead_sources(claim(untested="", bench=bench), ROOT) == ["lra: 3 x primal"]
    course = {"course": "vision/no_course", "figure": "gamma_cosine", "rows": ["softmax"], "limit": 1}
    assert dead_sources(claim(untested="", course=course), ROOT) == ["vision/no_course/softmax-0.json"]


def test_what_others_found_is_of_a_work_that_the_page_links():
    text = (ROOT / "docs/tables/claims.yaml").read_text(encoding="utf-8")
    works = set(re.findall(r'^ +"([\w-]+)": "\[', text, re.MULTILINE))
    assert {key for each in CLAIMS for key in each.others} == works


@pytest.mark.parametrize("source", [{"untested": ""}, {"tests": ["a::b"]}])
def test_a_claim_without_a_source_or_with_two_is_refused(source):
    with pytest.raises(InputError, match="one source"):
        claim(**source)


def test_two_claims_of_one_id_are_refused(tmp_path: Path):
    entry = {"id": "one", "where": "here", "kind": "cost", "says": "It is so.", "untested": "no data"}
    document = {"title": "A", "cite": "B", "summary": [], "claims": [entry, entry]}
    (tmp_path / "1-a.yaml").write_text(yaml.safe_dump(document), encoding="utf-8")
    with pytest.raises(InputError, match="share an id: one"):
        read_documents(tmp_path)
    (tmp_path / "1-a.yaml").write_text(
        yaml.safe_dump(document | {"claims": [entry | {"verdict": "exact"}]}), encoding="utf-8"
    )
    with pytest.raises(InputError, match="verdict"):  # none can be written down
        read_documents(tmp_path)


@pytest.mark.parametrize(
    ("differences", "sign", "margin", "verdict"),
    [
        ([(2, 1), (2, 1), (0, 1)], 1, 0, "confirmed"),
        ([(2, 1), (0, 1), (0, 1)], 1, 0, "same direction"),
        ([(2, 1), (-3, 1), (1, 2)], 1, 0, "contradicted"),  # as many, and the mean is not above zero
        ([(2, 1), (-1.5, 1), (2, 3)], 1, 0, "same direction"),
        ([(-2, 1)], 1, 0, "contradicted"),
        ([(-2, 1)], -1, 0, "confirmed"),
        ([(1, 2), (-1, 2)], 1, 0, "no difference found"),
        ([(0.5, 0.4), (0, 1)], 0, 1, "confirmed"),  # found, and within the margin
        ([(0.5, 0.6)], 0, 1, "no difference found"),
        ([(2, 0.5)], 0, 1, "contradicted"),
    ],
)
def test_a_verdict_follows_from_the_differences(differences, sign, margin, verdict):
    assert verdict_of([difference(*each) for each in differences], sign, margin) == verdict


def test_a_difference_is_found_by_its_p_value_and_its_interval():
    assert difference(2, 1).is_found
    assert not difference(2, 1, p_value=0.06).is_found
    assert not difference(2, 3).is_found


def records_of(figures):
    """A reader of imaginary records: by suite, row and column what the figures of each seed are."""

    def read(suite):
        rows = figures.get(suite.name, {})
        return {
            row: {
                column: {
                    seed: suite_record(read_suite(suite.name), row, column, seed, figures=each)
                    for seed, each in enumerate(seeds)
                }
                for column, seeds in rows.get(row, {}).items()
            }
            for row in suite.rows
        }

    return read


def answers(right: int, cases: int = 100):
    bits = pack_bits(np.arange(cases) < right)
    return {"evaluation": {"accuracy": right / cases, "cases": cases, "correct_bits": bits}}


def test_the_baseline_may_be_a_row_of_another_suite_even_of_the_same_name():
    column = "JapaneseVowels"
    read = records_of(
        {
            "multilinear_equal_budget": {"multilinear": {column: [answers(90), answers(92)]}},
            "multilinear_equal_dimension": {"multilinear": {column: [answers(60), answers(62)]}},
        }
    )
    beside = "multilinear_equal_dimension"
    entry = {"suite": "multilinear_equal_budget", "rows": {"multilinear": "multilinear"}, "beside": beside}
    found = judge(claim(untested="", compare=[entry]), read, ROOT / "results")
    assert found.verdict == "confirmed"
    assert found.differences[0].name == f"multilinear − multilinear of {beside}, JapaneseVowels"
    assert found.differences[0].mean == pytest.approx(30)
    wrong = claim(untested="", compare=[entry | {"beside": "kernel_pca_sst2"}])
    assert dead_sources(wrong, ROOT) == ["kernel_pca_sst2: multilinear"]


@pytest.mark.parametrize(
    ("expects", "verdict"), [("smaller", "confirmed"), ("larger", "contradicted"), ("alike", "contradicted")]
)
def test_the_last_layer_is_compared_with_the_mean_of_those_before(expects, verdict):
    layers = ([4.0, 6.0, 2.0], [4.0, 5.8, 2.0], [4.2, 6.0, 2.0])
    figures = [answers(90) | {"diagnostics": {"by_layer": {"mode_rank": each}}} for each in layers]
    read = records_of({"multilinear_course": {"all_layers": {"BasicMotions": figures}}})
    depth = [{"suite": "multilinear_course", "figure": "mode_rank", "rows": ["all_layers"]}]
    found = judge(claim(untested="", depth=depth, expects=expects, margin=1), read, ROOT / "results")
    assert found.verdict == verdict
    assert found.differences[0].mean == pytest.approx(-3)
    assert found.differences[0].repeats == (3, "seeds")
    with pytest.raises(InputError, match="no record of multilinear_course"):
        judge(claim(untested="", depth=depth), records_of({}), ROOT / "results")


def test_printed_figures_are_recomputed():
    right = {"printed": "2.0", "values": [1, 2, 3]}
    assert judge(claim(untested="", printed=[right]), no_records, ROOT).verdict == "exact"
    wrong = judge(claim(untested="", printed=[right, right | {"printed": "2.1"}]), no_records, ROOT)
    assert (wrong.verdict, wrong.figure) == (
        "corrected",
        "2.0, by the figures 2.00; 2.1, by the figures 2.00",
    )
    pairs = {"name": "errors", "ours": [1, 2], "baseline": [2, 2], "smaller": True}
    assert judge(claim(untested="", printed=[pairs]), no_records, ROOT).figure == "errors holds in 1 of 2"


def test_the_verdict_on_a_cost_is_that_of_its_ratios():
    entry = {"name": "operations", "bench": "primal-dual", "contender": "eager scaled_heads"}
    entry |= {"beside": "eager", "value": "operations.forward / theirs.operations.forward"}
    base = claim(untested="", bench=[entry | {"claimed": 0.75}])

    def said(**changes):
        return judge(replace(base, bench=[entry | changes]), no_records, ROOT / "results").verdict

    assert said(claimed=0.75) == "confirmed"  # 0.758
    assert said(claimed=0.9, allows="at most") == "confirmed"
    assert said(claimed=0.5) == "same direction"
    assert said(claimed=1.5) == "contradicted"


def test_the_page_and_the_data_have_every_claim_with_a_verdict():
    # That they are what make results writes now, test_results.py finds.
    data = json.loads((ROOT / "docs/claims.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/claims.md").read_text(encoding="utf-8")
    found = {each["id"]: each["verdict"] for each in data}
    assert list(found) == [each.id for each in CLAIMS]
    assert set(found.values()) == set(VERDICTS)
    assert dict(re.findall(r"<summary>([\w-]+): ([\w ]+)</summary>", page)) == found
    assert all(each["detectable"] for each in data if each["verdict"] == "no difference found")
