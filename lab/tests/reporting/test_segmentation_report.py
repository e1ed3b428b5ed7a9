"""The report of a segmentation: what it shows, and that damaged files leave a line instead of an error."""

from __future__ import annotations

import json

import numpy as np
import pytest
import yaml

from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.reporting.report import write_report

NAMES = ["sky", "road", "<b>car</b>"]
COUNTS = [[90, 10, 0], [20, 180, 0], [1, 9, 0]]


def evaluation(shift=0.0):
    corruptions = [
        {"corruption": name, "severity": severity, "mean_iou": 0.5 - severity / 10, "mean_accuracy": 0.5,
         "pixel_accuracy": 0.6}
        for name in ("fog", "gaussian_noise") for severity in (1, 3)
    ]  # fmt: skip
    return {
        "mean_iou": 0.55 + shift, "mean_accuracy": 0.6, "pixel_accuracy": 0.871, "loss": 0.4,
        "class_iou": [0.75, 0.9, 0.0], "class_accuracy": [0.9, 0.9, None], "confusion_matrix": COUNTS,
        "constant_mean_iou": 0.2151, "constant_mean_accuracy": 0.3333, "constant_pixel_accuracy": 0.6452,
        "majority_mean_iou": 0.4, "majority_mean_accuracy": 0.45, "majority_pixel_accuracy": 0.7,
        "corrupted_mean_iou": 0.3, "corrupted_mean_accuracy": 0.4, "corrupted_pixel_accuracy": 0.5,
        "corrupted_cases": 7, "corruptions": corruptions, "best_epoch": 2, "seconds": 3.0,
        "protocol": "holdout",
    }  # fmt: skip


def examples():
    generator = np.random.default_rng(0)
    labels = generator.integers(3, size=(2, 9, 12)).astype(np.uint8)
    labels[1, :4] = 255
    images = generator.integers(256, size=(2, 9, 12, 3)).astype(np.uint8)
    return {"images": images, "labels": labels, "predictions": np.roll(labels, 1, axis=2)}


@pytest.fixture
def folder(tmp_path):
    """A finished run of two seeds."""
    keys = {
        "task": "segmentation",
        "dataset": "streets",
        "attention": "softmax",
        "epochs": 2,
        "seeds": [0, 1],
    }
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(keys))
    facts = {"dataset": "streets", "task": "segmentation", "class_names": NAMES, "test_cases": 7}
    (tmp_path / "data.json").write_text(json.dumps(facts))
    rows = [
        {"epoch": epoch, "train_loss": 1 / epoch, "train_pixel_accuracy": 0.5, "val_loss": 1.0,
         "val_mean_iou": epoch / 5, "val_pixel_accuracy": 0.6, "seconds": 1.0}
        for epoch in (1, 2)
    ]  # fmt: skip
    for seed in (0, 1):
        (tmp_path / f"seed-{seed}").mkdir()
        (tmp_path / f"seed-{seed}/metrics.json").write_text(json.dumps(rows))
        (tmp_path / f"seed-{seed}/evaluation.json").write_text(json.dumps(evaluation(seed / 10)))
        np.savez(tmp_path / f"seed-{seed}/examples.npz", **examples())
    return tmp_path


def text_of(folder):
    return write_report(folder).read_text()


def test_the_page_has_every_section(folder):
    page = text_of(folder)
    for heading in ("Examples", "Baselines", "Confusion matrix", "Corruptions", "Learning curves"):
        assert f">{heading}</h2>" in page, heading
    assert "60.00 %" in page, "mean IoU over both seeds, in per cent"
    assert "semantic segmentation" in page
    for cell in (
        "the most frequent class everywhere",
        "21.51 %",
        "at every place the most frequent class there",
    ):
        assert cell in page
    assert "gaussian noise" in page
    assert "40.00 %" in page, "fog, severity 1"
    assert "7 test images" in page
    assert "20 times" not in page, "pixels are given in per cent"
    assert "50.00 % of all: road predicted as sky" in page
    assert "<b>car</b>" not in page, "names are text"
    assert page.count("test images with labels and predictions in colour") == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e: e | {"labels": e["labels"][:1]}, "labels are uint8 of shape (1, 9, 12)"),
        (lambda e: e | {"images": e["images"][..., :2]}, "images are uint8 of shape (2, 9, 12, 2)"),
        (lambda e: e | {"predictions": e["predictions"].astype(float)}, "predictions are float64 of shape"),
        (lambda e: {"images": e["images"], "labels": e["labels"]}, "has no 'predictions'"),
    ],
)
def test_damaged_examples_leave_a_line(change, message, folder, undrawn):
    np.savez(folder / "seed-1/examples.npz", **change(examples()))
    (problem,) = read_run(folder).problems
    assert "examples.npz" in problem
    assert message in problem
    if "shape (1" in message:
        assert "Some files of the run could not be used" in text_of(folder)
