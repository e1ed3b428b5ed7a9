"""The page of diagnostics says of the heads' distances what the records say."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT

from kernel_attention_lab.evidence import read_records

SUITES = ("primal_dual_uea", "primal_dual_uea-paper", "primal_dual_uea_more")
PAGE = ROOT / "docs/diagnostics.md"


def counted(label: str, figure: str) -> tuple[int, int]:
    """Pairs of models of one set and seed in which the row has a larger distance than softmax, and all."""
    larger, pairs = 0, 0
    for folder in sorted(
        path for suite in SUITES for path in (ROOT / "results/time_series" / suite).iterdir()
    ):
        distances = {
            (record.label, record.seed): record.figures["diagnostics"][figure]
            for record in read_records(folder)
            if "diagnostics" in record.figures
        }
        for (row, seed), distance in distances.items():
            if row == label and ("softmax", seed) in distances:
                larger += distance > distances["softmax", seed]
                pairs += 1
    return larger, pairs


@pytest.mark.parametrize("label", ["batch_norm", "scaled_heads", "batch_norm_scaled_heads"])
@pytest.mark.parametrize("figure", ["head_distance", "matrix_distance"])
def test_the_counts_of_the_page_are_those_of_the_records(label, figure):
    larger, pairs = counted(label, figure)
    row = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"| `{label}` |" in line)
    said = [tuple(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+)", row)]
    assert said[("head_distance", "matrix_distance").index(figure)] == (larger, pairs)
