"""The page of control is what the records say."""

from __future__ import annotations

from pathlib import Path

import pytest
from declared import draw, rows_of
from suite_records import suite_record

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import ResultRecord, read_suite, write_records

ROOT = Path(__file__).parents[2]
PAGE = "docs/control-results.md"
SUITE = read_suite("primal_attention_d4rl")


def record(label: str, seed: int, column: str, score: float, **config) -> ResultRecord:
    figures = {
        "normalized_score": score,
        "normalized_score_deviation": 10.0 + seed,
        "normalized_score_target_1800": score - 5.0,
        "loss": 0.1 + seed / 100,
        "episode_length": 300.0,
        "episodes": 20,
        "memory": "sliding",
        "data_normalized_score": 67.2,
        "best_data_normalized_score": 113.4,
        "random_normalized_score": 1.1,
        "gymnasium": "1.4.0",
        "mujoco": "4.0.0",
    }
    return suite_record(
        SUITE, label, column, seed, config=config, revision="0123456789abcdef",
        budget={"steps": 5000, "seconds": 100.0 + seed, "threads": 1}, figures={"evaluation": figures},
    )  # fmt: skip


def test_the_tables_are_those_of_the_records(tmp_path):
    """Three seeds of primal, one of cloning; 80, 90 and 100 have mean 90 and deviation 10."""
    column = "hopper_medium_expert"
    records = [record("primal", seed, column, 80.0 + 10 * seed) for seed in range(3)]
    records.append(record("cloning_best_tenth", 0, column, 75.0))
    write_records(records, tmp_path / "results" / SUITE.records / column)
    regions, _ = draw(PAGE, tmp_path)
    head, scores = rows_of(regions["control-scores"])
    assert head[0] == "data"
    assert scores == [
        "hopper, medium-expert", "", "90.0 ± 10.0", "", "75.0 (seed 0)", "67.2", "112.0",
    ]  # fmt: skip
    assert rows_of(regions["control-targets"])[1] == [
        "hopper, medium-expert", "", "90.0 / 85.0", "", "0.110", "",
    ]  # fmt: skip
    assert rows_of(regions["control-spread"])[1] == [
        "hopper, medium-expert", "", "11.0 (300)", "", "10.0 (300)",
    ]  # fmt: skip
    assert rows_of(regions["control-data"])[1] == ["hopper, medium-expert", "67.2", "113.4", "1.1"]
    text = " ".join(regions["control-runs"])
    assert "4 models, 100 to 102 s of training each" in text
    assert "gymnasium 1.4.0, MuJoCo 4.0.0; 20 episodes" in text


def test_records_that_cannot_be_compared_are_refused(tmp_path):
    """A row that the suite does not have, and models that differ in more than the policy."""
    column = "hopper_medium"
    folder = tmp_path / "results" / SUITE.records / column
    write_records([record("primal", 0, column, 1.0), record("softmax", 0, column, 2.0, steps=7)], folder)
    with pytest.raises(InputError, match="steps"):
        draw(PAGE, tmp_path)
    for path in folder.iterdir():
        path.unlink()
    made = record("primal", 0, column, 1.0)
    write_records([ResultRecord(**(vars(made) | {"label": "other"}))], folder)
    with pytest.raises(InputError, match="has no row other"):
        draw(PAGE, tmp_path)
