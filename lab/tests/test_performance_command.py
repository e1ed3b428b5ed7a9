"""``bench --record``: the record that a table is made from, and none of uncommitted code."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from checkout import ROOT

from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import SUITES
from kernel_attention_lab.benchmarking.comparisons import ROW_SUITES
from kernel_attention_lab.cli import comparisons
from kernel_attention_lab.options import Bench


@pytest.fixture
def committed(monkeypatch):
    monkeypatch.setattr(comparisons, "code_revision", lambda: {"revision": "0123abc"})


def test_the_record_has_no_orders(committed, tmp_path):
    path = tmp_path / "kept.json"
    sizes = {"length": [17], "embed_dim": [16], "num_heads": [2], "rounds": 2, "memory": False}
    options = Bench(attention=["linear"], output=str(tmp_path / "out"), record=str(path), **sizes)
    assert comparisons.bench_command(options) == 0
    whole, kept = (json.loads(each.read_text()) for each in (tmp_path / "out/benchmark.json", path))
    assert all(cell.pop("orders") for cell in whole["cells"])
    assert kept == whole


def test_a_suite_of_rows_leaves_the_same_in_both_files(committed, tmp_path, monkeypatch):
    small = {"machine": {}, "settings": {}, "rows": [{"form": "a", "seconds": 0.25}]}
    monkeypatch.setattr("kernel_attention_lab.benchmarking.comparisons.run_rows", lambda *_, **__: small)
    options = Bench(suite="around", output=str(tmp_path / "out"), record=str(tmp_path / "kept.json"))
    assert comparisons.bench_command(options) == 0
    for path in (tmp_path / "out/benchmark.json", tmp_path / "kept.json"):
        assert json.loads(path.read_text()) == small


def test_uncommitted_code_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(comparisons, "code_revision", lambda: {"revision": "0123abc+"})
    with pytest.raises(InputError, match="uncommitted"):
        comparisons.bench_command(Bench(suite="around", record=str(tmp_path / "kept.json")))


def test_make_performance_measures_every_suite_that_has_a_record():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    lists = {
        name: set(found.split()) for name, found in re.findall(r"^(\w*SUITES) := (.+)$", text, re.MULTILINE)
    }
    assert lists["ROW_SUITES"] == set(ROW_SUITES)
    assert lists["SUITES"] <= set(SUITES)
    kept = {path.stem for path in Path(ROOT / "results/benchmarks").glob("*.json")} & set(SUITES)
    assert kept == lists["SUITES"]
