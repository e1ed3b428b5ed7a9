"""The figures of a classification, by hand."""

from __future__ import annotations

import json
import shutil

import numpy as np
import torch
from runs.small_runs import trained, waves  # noqa: F401

from kernel_attention_lab.evidence import make_records
from kernel_attention_lab.packing import unpack_bits
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks.metrics import classification_metrics


def test_the_bits_say_which_cases_are_right():
    logits = torch.tensor([[2.0, 1.0, 0.0], [0.0, 1.0, 5.0], [0.0, 3.0, 1.0]])
    figures = classification_metrics(logits, np.array([0, 1, 1]))
    assert unpack_bits(figures["correct_bits"], figures["cases"]).tolist() == [True, False, True]
    assert figures["accuracy"] == 2 / 3
    assert figures["confusion_matrix"] == [[1, 0, 0], [0, 1, 1], [0, 0, 0]]


def test_a_record_keeps_the_bits_of_its_run(trained):  # noqa: F811
    for seed, record in enumerate(make_records(trained)):
        evaluation = json.loads((trained / f"seed-{seed}/evaluation.json").read_text())
        figures = record.figures["evaluation"]
        assert figures["correct_bits"] == evaluation["correct_bits"]
        bits = unpack_bits(figures["correct_bits"], figures["cases"])
        assert bits.mean() == figures["accuracy"]
        assert bits.sum() == np.trace(evaluation["confusion_matrix"])


def test_a_run_of_an_earlier_version_has_no_bits_and_still_opens(trained, tmp_path):  # noqa: F811
    folder = shutil.copytree(trained, tmp_path / "run")
    path = folder / "seed-0/evaluation.json"
    old = json.loads(path.read_text())
    bits = old.pop("correct_bits")
    path.write_text(json.dumps(old))
    record = make_records(folder)[0]
    assert "correct_bits" not in record.figures["evaluation"]
    (_, again), _ = load_run(folder).evaluate()
    assert again["correct_bits"] == bits, "measured again, the same cases are right"
