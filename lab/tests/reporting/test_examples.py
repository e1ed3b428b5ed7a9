"""The report's part on example images: what it says of them, and of files that cannot be shown."""

from __future__ import annotations

import numpy as np
import pytest

from kernel_attention_lab.reporting import html
from kernel_attention_lab.reporting.examples import examples_section
from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.runs.files import write_arrays

COUNT = 7


def examples(**changes):
    generator = np.random.default_rng(0)
    found = {
        "images": generator.integers(0, 256, (COUNT, 6, 8, 3), dtype=np.uint8),
        "targets": np.array([0, 1, 2, 0, 1, 2, 0]),
        "predictions": np.array([0, 1, 2, 0, 1, 2, 1]),
        "probabilities": np.linspace(0.4, 1.0, COUNT, dtype=np.float32),
        "attention": generator.random((COUNT, 3, 3, 4), dtype=np.float32),
        "attention_text": np.array("rpc: the attention of the class token to the patches"),
    }
    return {name: value for name, value in (found | changes).items() if value is not None}


@pytest.fixture
def folder(make_run):
    return make_run("one seed")


def page_of(folder):
    section = examples_section(read_run(folder))
    return html.page("title", "lead", [], [section] if section else [], "footer")


def test_the_section_has_the_pictures(folder):
    write_arrays(folder / "seed-0/examples.npz", examples())
    page = page_of(folder)
    assert "7 test images with predictions, 6 of them right." in page
    assert "First layer, rpc: the attention of the class token to the patches." in page
    assert page.count("<img") == 2


def test_a_mechanism_without_a_map_says_so(folder, undrawn):
    text = "multilinear has no attention matrix, so there is no picture of it"
    write_arrays(folder / "seed-0/examples.npz", examples(attention=None, attention_text=np.array(text)))
    page = page_of(folder)
    assert "Multilinear has no attention matrix, so there is no picture of it." in page
    assert page.count("<img") == 1


def test_other_runs_have_no_section(folder):
    assert examples_section(read_run(folder)) is None


@pytest.mark.parametrize(
    "changes",
    [
        {"images": np.zeros((COUNT, 6, 8), np.uint8)},
        {"images": np.zeros((COUNT, 6, 8, 3), np.float32)},
        {"targets": np.zeros(COUNT - 1, np.int64)},
        {"predictions": np.zeros(COUNT)},
        {"probabilities": np.full(COUNT, np.nan)},
        {"probabilities": None},
        {"attention": np.zeros((COUNT, 3, 12))},
        {"attention": np.full((COUNT, 3, 3, 4), np.inf)},
        {"attention_text": np.array(["one", "two"])},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_damaged_examples_are_named_and_left_out(folder, changes):
    write_arrays(folder / "seed-0/examples.npz", examples(**changes))
    run = read_run(folder)
    assert [problem.partition(":")[0] for problem in run.problems] == ["seed-0/examples.npz"]
    assert examples_section(run) is None


def test_a_file_that_is_no_archive_is_named(folder):
    (folder / "seed-0/examples.npz").write_bytes(b"PK not an archive")
    (problem,) = read_run(folder).problems
    assert problem.startswith("seed-0/examples.npz: not readable as examples")
