"""What the terminal shows: the same figures, always with their protocol."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from kernel_attention_lab.reporting import evaluation_table, summary_table
from kernel_attention_lab.reporting.formats import (
    attention_details,
    attention_title,
    format_metric,
    metric_name,
)

SUMMARY = {
    "recipe": "uea/japanese_vowels",
    "dataset": "JapaneseVowels",
    "attention": {"primal": {"rank": 20}},
    "protocol": "holdout",
    "protocol_text": "The epoch is selected on [bold]a part[/bold] of the training split.",
    "seeds": [0, 1, 2],
    "metric": "accuracy",
    "values": [0.97, 0.98, 0.99],
    "mean": 0.98,
    "std": 0.01,
}


def printed(summary) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(summary_table(summary))
    return console.file.getvalue()


def test_the_table_names_protocol_seeds_mean_and_deviation():
    text = printed(SUMMARY)
    for part in (
        "protocol holdout",
        "97.00 %",
        "98.00 ± 1.00 %",
        "uea/japanese_vowels · JapaneseVowels · primal",
    ):
        assert part in text
    assert "[bold]a part[/bold]" in text  # not read as markup


def test_one_seed_has_no_deviation():
    one = SUMMARY | {"seeds": [4], "values": [0.97], "mean": 0.97, "std": None}
    assert "±" not in printed(one)


@pytest.mark.parametrize(
    ("spec", "title", "details"),
    [
        ("primal", "primal", "primal"),
        ({"primal": {"rank": 20, "eta": 0.1}}, "primal", "primal (rank 20, eta 0.1)"),
        (["primal", {"rank": 20}], "primal", "primal (rank 20)"),
        (
            ["softmax", {"primal": {"rank": 9}}],
            "softmax + primal",
            "layer 0: softmax; layer 1: primal (rank 9)",
        ),
        (["primal", "primal"], "primal", "primal"),
        (
            [*[{"rpc": {"iterations": 4}}] * 3, "symmetric", "softmax", "softmax"],
            "rpc + symmetric + softmax",
            "layers 0 to 2: rpc (iterations 4); layer 3: symmetric; layers 4 to 5: softmax",
        ),
        (None, "unknown", "unknown"),
    ],
)
def test_attention_specs_are_readable(spec, title, details):
    assert attention_title(spec) == title
    assert attention_details(spec) == details


@pytest.mark.parametrize(
    "kind", ["language, several seeds", "tokens", "regression, several seeds", "one seed"]
)
def test_evaluations_of_every_task_fit_a_terminal(finished, kind):
    """Every figure is there, whole, at 80 characters."""
    rows = [
        {"seed": int(folder.name.removeprefix("seed-"))}
        | json.loads((folder / "evaluation.json").read_text())
        for folder in sorted(finished(kind).glob("seed-*"))
    ]
    console = Console(file=io.StringIO(), width=80)
    console.print(evaluation_table(rows, "a test split"))
    text = console.file.getvalue()
    assert "…" not in text
    lines = {line.split("│")[1].strip(): line.split("│")[2:-1] for line in text.splitlines() if "│" in line}
    for key in rows[0].keys() - {"seed", "confusion_matrix", "correct_bits"}:
        assert [cell.strip() for cell in lines[metric_name(key)]] == [
            format_metric(key, r[key]) for r in rows
        ]
    assert "confusion matrix" not in text
    assert "correct bits" not in text
