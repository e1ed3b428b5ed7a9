"""The report of a run: complete, well-formed, closed to the outside, and honest about what is missing.

The runs are the trainer's own, so a report that no longer fits what training writes is a failure here.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from reporting.conftest import KINDS, STOPPED_AT
from runs.small_runs import undrawn_pages

from kernel_attention.errors import InputError
from kernel_attention_lab.reporting import write_report
from kernel_attention_lab.reporting.records import read_run

VOID = {"meta", "img", "br", "link", "input", "hr"}
ALWAYS = ["seeds", "curves", "objective", "data", "configuration", "reproduce"]
BY_TASK = {
    "classification": ["confusion"],
    "regression": [],
    "language": ["baselines"],
    "decisions": ["baselines", "episodes"],
}


class Page(HTMLParser):
    """Reads a page and insists that every element is closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, str] = {"": ""}
        self.section = ""
        self.feed(text)
        self.close()
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "section":
            self.section = dict(attrs)["id"]
            self.words[self.section] = ""
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        if tag in ("th", "td", "dt", "dd"):
            self.words[self.section] += " "
        if tag == "section":
            self.section = ""

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words[self.section] += data

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]

    @property
    def text(self):
        return " ".join(self.words.values())


def read(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    assert path.stat().st_size < 2_000_000
    return Page(path.read_text(encoding="utf-8"))


DRAWN = ("many of everything", "language", "decisions")
"""Kinds whose pictures are drawn; those of the others have no other parts."""


@pytest.fixture(scope="session")
def page(finished):
    """``page(kind)``: the report of a finished run, read once."""

    @functools.cache
    def page(kind: str) -> Page:
        with contextlib.nullcontext() if kind in DRAWN else undrawn_pages():
            return read(finished(kind))

    return page


def content(run: Path, name: str):
    return json.loads((run / name).read_text())


@pytest.mark.parametrize("kind", KINDS)
def test_every_run_gives_a_complete_page_that_loads_nothing(finished, page, kind):
    found = page(kind)
    sections = [attributes["id"] for attributes in found.all("section")]
    is_finished = kind not in STOPPED_AT
    expected = {*ALWAYS, *BY_TASK[content(finished(kind), "data.json")["task"]]}
    expected -= set() if is_finished else {"baselines"}
    assert expected <= set(sections) <= expected | {"spectrum"}
    assert [link["href"] for link in found.all("a")] == [f"#{name}" for name in sections]
    assert all(image["src"].startswith("data:image/") and image["alt"] for image in found.all("img"))
    assert not found.all("script")
    assert not found.all("link")
    assert "default-src 'none'" in found.all("meta")[1]["content"]
    assert all(found.words[name].strip() for name in sections)
    assert not any(name.startswith("on") for _, attributes in found.tags for name in attributes)


def test_the_figure_stands_beside_its_protocol_and_seeds(finished, page):
    summary = content(finished("several seeds"), "summary.json")
    head = page("several seeds").words[""]
    assert f"{100 * summary['mean']:.2f} ± {100 * summary['std']:.2f} %" in head
    assert "protocol paper" in head
    assert "seeds 0, 1, 2" in head
    assert summary["protocol_text"][1:] in head


def test_the_table_of_seeds_ends_with_mean_and_deviation(finished, page):
    summary = content(finished("several seeds"), "summary.json")
    rows = page("several seeds").words["seeds"]
    assert "mean ± deviation" in rows
    assert f"{100 * summary['mean']:.2f} ± {100 * summary['std']:.2f} %" in rows
    assert "±" not in page("one seed").words["seeds"]


def test_selection_on_the_test_split_is_said_at_the_curves(page):
    assert "selected on the test split" in page("several seeds").words["curves"]
    part = page("part of the test split").words
    assert (
        "Under the protocol thesis-3 the epoch is selected on the last 20 % of the test split"
        in part["curves"]
    )
    assert re.search(r"Test cases\s+3\b", part[""]), "the cases reported, not those of the data set"
    assert any("Test split ends at" in image["alt"] for image in page("several seeds").all("img"))
    assert "test split" not in page("one seed").words["curves"]


def test_tables_hold_configuration_versions_data_seeds_and_command(finished, page):
    found, run = page("several seeds"), finished("several seeds")
    versions, summary = content(run, "versions.json"), content(run, "summary.json")
    assert "batch_size: 7" in found.words["configuration"]
    for text in (versions["torch"], versions["command"], summary["machine"]):
        assert text in found.words["reproduce"]
    assert re.search(r"test cases\s+15\b", found.words["data"])
    assert re.search(r"channels\s+3\b", found.words["data"])
    rows = [line for line in found.words["seeds"].splitlines() if "evaluated" in line]
    assert [row.strip()[0] for row in rows] == ["0", "1", "2"]


def test_text_from_data_and_recipes_is_never_markup(make_run, undrawn):
    hostile = "<script>alert(1)</script>"
    run = make_run(dataset="Hostile", epochs=1)
    config = run / "config.yaml"
    config.write_text(config.read_text() + f"note: '{hostile}'\n")
    for name in ("summary.json", "data.json"):
        (run / name).write_text(json.dumps(content(run, name) | {"dataset": hostile, "recipe": hostile}))
    found = read(run)
    assert not found.all("script")
    for section in ("confusion", "configuration", "data", ""):
        assert hostile in found.words[section]


def test_regression_shows_its_own_metrics(page):
    found = page("regression, several seeds")
    assert "Test RMSE" in found.words[""]
    assert "confusion" not in found.words
    assert "accuracy" not in found.text


def test_a_layer_without_an_objective_is_said_and_one_without_a_kernel_is_left_out(page):
    assert "No layer has an objective" in page("no objective").words["objective"]
    assert "No layer of this run has a kernel" in page("no kernel").words["spectrum"]
    assert "spectrum" not in page("language").words


def test_a_language_run_counts_steps_and_shows_every_perplexity(finished, page):
    evaluation = content(finished("language"), "seed-0/evaluation.json")
    found = page("language")
    assert f"{evaluation['perplexity']:.4g}" in found.words[""]
    for name in ("", "attacked_", "attacked_inputs_", "unigram_", "bigram_", "uniform_"):
        for split in ("", "validation_"):
            if f"{split}{name}perplexity" in evaluation:
                assert f"{evaluation[f'{split}{name}perplexity']:.4g}" in found.words["baselines"]
    guess = f"{evaluation['uniform_perplexity']:.4g}"
    assert re.search(rf"a uniform guess\s+{guess}\s+{guess}", found.words["baselines"]), (
        "the same for any text"
    )
    assert f"{evaluation['unigram_perplexity']:.4g}" in found.words[""]
    rows = found.words["seeds"]
    assert "test perplexity" in rows
    assert "selected step" in rows
    assert re.search(rf"\b{evaluation['best_step']}\b", rows)
    assert re.search(r"Training\s*30 steps", found.words[""])
    assert "epoch" not in "".join(text for name, text in found.words.items() if name != "configuration")
    assert not any("epoch" in image["alt"] for image in found.all("img"))
    assert "confusion" not in found.text


def test_a_model_no_better_than_counts_is_called_so(finished, page):
    evaluation = content(finished("language, no better than counts"), "seed-0/evaluation.json")
    assert evaluation["perplexity"] > evaluation["unigram_perplexity"]
    assert "predicts the test split no better than" in page("language, no better than counts").words[""]
    better = content(finished("language"), "seed-0/evaluation.json")
    assert better["perplexity"] < better["unigram_perplexity"]
    assert "unigram counts (" not in page("language").words[""]


@pytest.mark.parametrize(
    ("kind", "reached"),
    [
        ("interrupted", "seed 0 has completed epoch 3 of 5; seed 1 has not started"),
        ("interrupted in the first epoch", "seed 0 has completed no epoch"),
        ("interrupted language", "seed 0 has completed step 20 of 30"),
    ],
)
def test_an_interrupted_run_says_how_far_it_came(page, kind, reached):
    found = page(kind)
    assert reached in found.words[""]
    assert "--resume" in found.words[""]
    assert "has not been evaluated" in found.words[""]


def test_a_figure_of_some_seeds_only_is_called_preliminary(make_run, undrawn):
    run = make_run("regression, several seeds")
    rmse = content(run, "seed-0/evaluation.json")["rmse"]
    (run / "summary.json").unlink()
    (run / "seed-1" / "evaluation.json").unlink()
    head = read(run).words[""]
    assert f"{rmse:.4g}" in head
    assert "preliminary" in head
    assert "seed 1 has completed epoch 3 of 3" in head


@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "seed-0/metrics.json"])
def test_files_that_cannot_be_read_are_named_and_the_rest_is_shown(make_run, undrawn, name):
    run = make_run("no kernel")
    (run / name).write_text("{")
    found = read(run)
    assert len(found.all("img")) >= 1
    assert set(ALWAYS) <= {attributes["id"] for attributes in found.all("section")}
    assert f"{name}: not " in found.words[""]
    assert str(run) not in found.words[""]


@pytest.mark.parametrize(
    "name",
    ["summary.json", "data.json", "versions.json", "config.yaml"]
    + [f"seed-0/{part}.json" for part in ("metrics", "evaluation", "spectra", "diagnostics")],
)
def test_whatever_stands_in_a_file_the_run_is_read_and_the_file_named(make_run, name):
    run = make_run("no kernel")
    for damage in ("{", "3", "", "\0", "[" * 100_000, '[{"epoch": 1, "train_loss": "x"}]'):
        (run / name).write_text(damage)
        (problem,) = read_run(run).problems
        assert problem.startswith(f"{name}: ")
        assert "\n" not in problem


def test_the_same_run_gives_the_same_bytes(make_run):
    run = make_run("language")
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_a_failed_write_leaves_the_old_report_and_no_litter(make_run, undrawn, monkeypatch):
    run = make_run("interrupted in the first epoch")
    write_report(run).write_text("old")
    before = sorted(path.name for path in run.iterdir())

    def refuse(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(InputError, match=r"report\.html.*No space left"):
        write_report(run)
    assert (run / "report.html").read_text() == "old"
    assert sorted(path.name for path in run.iterdir()) == before


def test_folders_without_a_run_are_refused_in_one_line(tmp_path):
    for folder in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(InputError) as caught:
            write_report(folder)
        assert str(folder) in str(caught.value)
        assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())
