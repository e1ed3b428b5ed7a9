"""The page of diagnostics is what the records of a course over training say."""

from __future__ import annotations

import json
from pathlib import Path

from declared import draw

PAGE, RECORDS = "docs/diagnostics.md", "results/vision/cifar10_deep_course"
FIGURE = Path("docs/figures/over-training.svg")


def write(folder, label, values, seed=0):
    course = {"cases": "", "epochs": [0, 1, 2], "figures": {"gamma_cosine": values}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{label}-{seed}.json").write_text(json.dumps(course))


def test_rows_have_the_mean_and_three_layers_at_three_epochs(tmp_path):
    write(tmp_path / RECORDS, "softmax", [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, None]])
    regions, figures = draw(PAGE, tmp_path)
    rows = [line for line in regions["over-training"] if line.startswith("| gamma")]
    assert rows == [
        "| gamma: cosine | softmax | 0.2 → 0.5 → 0.75 | 0.1 → 0.4 → 0.7 | 0.2 → 0.5 → 0.8 | 0.3 → 0.6 → – |"
    ]
    assert set(figures) == {FIGURE}
    assert "gamma: cosine" in figures[FIGURE]


def test_seeds_are_averaged(tmp_path):
    write(tmp_path / RECORDS, "symmetric", [[0.0], [0.2], [0.4]])
    write(tmp_path / RECORDS, "symmetric", [[0.2], [0.4], [0.6]], seed=1)
    lines = draw(PAGE, tmp_path)[0]["over-training"]
    assert "| gamma: cosine | symmetric | 0.1 → 0.3 → 0.5 |" in "\n".join(lines)
    assert "Before training → after epoch 1 → after epoch 2. symmetric: 2 seeds." in lines
