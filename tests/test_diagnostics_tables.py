"""The page of diagnostics is what the records of a course over training say."""

from __future__ import annotations

import json

import numpy as np
import pytest


@pytest.fixture
def tables(tool):
    return tool("diagnostics_tables")


def write(folder, label, values):
    course = {"cases": "", "epochs": [0, 1, 2], "figures": {"gamma_cosine": values}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{label}-0.json").write_text(json.dumps(course))


def test_without_records_the_page_says_so(tables, tmp_path):
    assert tables.texts(tmp_path) == ({"over-training": ["", "Not measured yet.", ""]}, {})


def test_rows_have_the_mean_and_three_layers_at_three_epochs(tables, tmp_path):
    write(tmp_path / tables.RECORDS, "softmax", [[0.1, 0.2, 0.3], [0.4, 0.5, 0.6], [0.7, 0.8, None]])
    regions, figures = tables.texts(tmp_path)
    rows = [line for line in regions["over-training"] if line.startswith("| gamma")]
    assert rows == [
        "| gamma: cosine | softmax | 0.2 → 0.5 → 0.75 | 0.1 → 0.4 → 0.7 | 0.2 → 0.5 → 0.8 | 0.3 → 0.6 → – |"
    ]
    assert set(figures) == {tables.FIGURE}
    assert np.char.count(figures[tables.FIGURE], "</svg>") == 1
