"""Suites of rows: every one measures what its table on a page of the documentation reads."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from checkout import ROOT
from declared import draw

from kernel_attention_lab.benchmarking import comparisons
from kernel_attention_lab.benchmarking.comparisons import ROW_SUITES, ratio_row, run_rows, take_turns

SMALL = {
    "primal-forms": {"length": 17, "batch": 2, "causal_lengths": [11, 13], "rounds": 2, "causal_rounds": 2},
    "precisions": {"length": 17, "embed_dim": [16], "rounds": 2},
    "compiled-forms": {"length": [17], "rounds": 2, "eager": True},
    "around": {"rounds": 2},
    "decoding": {"lengths": [17, 31], "embed_dim": 16, "num_heads": 2, "rounds": 2, "steps": 3},
    "rollouts": {"lengths": [7, 11], "contexts": [3, 5], "episodes": 2, "steps": 2, "rounds": 2},
}


@pytest.mark.parametrize("name", SMALL)
def test_a_suite_gives_the_rows_that_its_table_shows(name, tmp_path, monkeypatch):
    suite = ROW_SUITES[name]
    small = replace(suite, settings=dict(suite.settings) | SMALL[name])
    monkeypatch.setitem(ROW_SUITES, name, small)
    if name == "around":
        one = dict(list(comparisons._MODELS.items())[:1])
        monkeypatch.setattr(comparisons, "_MODELS", one)
    record = run_rows(name)
    figures = [value for row in record["rows"] for value in row.values() if isinstance(value, float)]
    assert figures
    assert all(math.isfinite(value) and value > 0 for value in figures)
    kept = json.loads((ROOT / f"results/benchmarks/{name}.json").read_text(encoding="utf-8"))
    assert {key for row in kept["rows"] for key in row} == {key for row in record["rows"] for key in row}
    path = tmp_path / "results/benchmarks" / f"{name}.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(record), encoding="utf-8")
    page = Path("docs/control-results.md" if name == "rollouts" else "docs/performance.md")
    lines = next(
        iter(draw(str(page), tmp_path, f"control-{name}" if name == "rollouts" else name)[0].values())
    )
    assert len([line for line in lines if line.startswith("| ")]) > 1


def test_the_committed_records_have_the_settings_of_their_suites():
    for name, suite in ROW_SUITES.items():
        kept = json.loads((ROOT / f"results/benchmarks/{name}.json").read_text(encoding="utf-8"))
        for key, value in kept.get("settings", {}).items():
            assert suite.settings.get(key, value) == value, (name, key)


def test_a_ratio_is_the_median_over_the_rounds():
    row = ratio_row({"ours": [1.0, 2.0, 9.0], "theirs": [2.0, 2.0, 3.0]}, "ours", "theirs")
    assert row["ratio_median"] == 1.0
    assert (row["ratio_lower"], row["ratio_upper"]) == (0.75, 2.0)


def test_runs_take_turns():
    order: list[str] = []

    def run(name: str):
        return lambda: order.append(name) or float(len(order))

    times = take_turns({name: run(name) for name in "abc"}, 5)
    turns = [order[start : start + 3] for start in range(9, 24, 3)]
    assert all(sorted(turn) == ["a", "b", "c"] for turn in turns)
    assert {len(found) for found in times.values()} == {5}
