"""A run of series far from zero: trained, kept, exported and asked as one of the same series at zero."""

from __future__ import annotations

import csv
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.conftest import cli, here  # noqa: F401
from runs.small_runs import read_json, train_small

from kernel_attention_lab.runs.saved import load_run

pytestmark = pytest.mark.usefixtures("brief")
STEPS = 12


def make_tables(folder: Path, offset: float) -> Path:
    """Waves of size 1 around an offset, in a table of 20 cases and one of 8; both exact at every offset."""
    generator = np.random.default_rng(0)
    folder.mkdir()
    for name, count in (("train", 20), ("test", 8)):
        with (folder / f"{name}.csv").open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow([*(f"u{step}" for step in range(STEPS)), "target"])
            for case in range(count):
                wave = np.sin((0.4 + case % 2) * np.arange(STEPS) + generator.uniform(0, 6))
                writer.writerow(
                    [*(repr(float(x)) for x in np.round(wave * 64) / 64 + offset), "ab"[case % 2]]
                )
    return folder


def trained_at(tmp_path: Path, offset: float, **changes):
    root = make_tables(tmp_path / f"data {offset:g}", offset)
    folder = tmp_path / f"run {offset:g}"
    run = train_small(folder, root, dataset="train.csv", test_file="test.csv", epochs=2, **changes)
    return load_run(run), root


@pytest.mark.filterwarnings("ignore:precision=bf16-mixed")
@pytest.mark.parametrize(
    ("offset", "changes"),
    [
        (1e9, {}),
        (1e9, {"stem": "rocket"}),
        (4096.0, {"precision": "bf16-mixed"}),  # whose inputs lost their signal before they were centred
    ],
    ids=["papers", "rocket", "16 bits"],
)
def test_a_run_is_that_of_the_same_series_at_zero(tmp_path, offset, changes):
    plain, _ = trained_at(tmp_path, 0.0, **changes)
    moved, root = trained_at(tmp_path, offset, **changes)
    (one, other) = (read_json(run.folder / "seed-0" / "metrics.json") for run in (plain, moved))
    tolerance = 0.02 if "precision" in changes else 1e-3
    for expected, found in zip(one, other, strict=True):
        assert found["train_loss"] == pytest.approx(expected["train_loss"], rel=tolerance)
    probabilities = [row["probability_a"] for row in moved.predict(root / "test.csv")]
    assert np.ptp(probabilities) > 1e-3
    ((_, figures),) = moved.evaluate(root / "test.csv")
    evaluation = read_json(moved.folder / "seed-0" / "evaluation.json")
    assert evaluation["loss"] == pytest.approx(figures["loss"], rel=1e-6)


def test_what_is_exported_keeps_the_scale(tmp_path, cli):  # noqa: F811
    pytest.importorskip("transformers", reason="transformers is not installed")
    run, _ = trained_at(tmp_path, 1e9 + 1.0)
    model = run.model()
    assert model.encoder.input_mean_rest.any()
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, STEPS, 1))) + 1e9
    mask = torch.ones(3, STEPS, dtype=torch.bool)
    expected = model(x, mask)
    assert expected.std(dim=0).max() > 1e-3
    assert cli("export", run.folder, tmp_path / "folder")[0] == 0
    from kernel_attention.hosts.hugging_face import KernelAttentionForTimeSeriesClassification

    loaded = KernelAttentionForTimeSeriesClassification.from_pretrained(tmp_path / "folder")
    assert torch.equal(loaded(x).logits, expected)


@pytest.mark.slow
def test_a_program_keeps_the_scale(tmp_path, cli):  # noqa: F811
    run, _ = trained_at(tmp_path, 1e9 + 1.0)
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(3, STEPS, 1))) + 1e9
    mask = torch.ones(3, STEPS, dtype=torch.bool)
    assert cli("export", run.folder, "--to", "torch", tmp_path / "model.pt2")[0] == 0
    program = torch.export.load(tmp_path / "model.pt2").module()
    torch.testing.assert_close(program(x=x, attention_mask=mask), run.model()(x, mask), atol=1e-5, rtol=1e-5)
