"""The report of a run: complete, well-formed, closed to the outside, and honest about what is missing."""

from __future__ import annotations

import json
import os
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kernel_attention.errors import InputError
from kernel_attention.experiments.reporting import write_report

VOID = {"meta", "img", "br", "link", "input", "hr"}
SECTIONS = [
    "seeds",
    "curves",
    "objective",
    "confusion",
    "spectrum",
    "data",
    "configuration",
    "reproduce",
]


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


SMALL = {"epochs": 2, "layers": 1, "heads": 1, "class_names": ["a", "b"]}  # where the pictures do not matter


def read(run: Path) -> Page:
    path = write_report(run)
    assert path == run / "report.html"
    assert path.stat().st_size < 2_000_000
    return Page(path.read_text(encoding="utf-8"))


VARIANTS = {
    "one seed": {},
    "several seeds": {"seeds": [0, 1, 2], "protocol": "paper", "every": 3},
    "regression": {"task": "regression"},
    "regression, several seeds": {"task": "regression", "seeds": [0, 1]},
    "no objective, no spectra": {"objective": False, "spectra": False},
    "interrupted": {"stopped_after": 3, "seeds": [0, 1]},
    "interrupted in the first epoch": {"stopped_after": 0},
    "one epoch": {"epochs": 1},
    "more classes than counts": {"class_names": [f"word {i}" for i in range(30)]},
    "more classes than names": {"class_names": [f"word {i}" for i in range(95)], "heads": 12, "layers": 1},
    "many of everything": {"seeds": range(9), "layers": 5, "epochs": 200},
}


@pytest.mark.parametrize("what", VARIANTS.values(), ids=VARIANTS.keys())
def test_every_run_gives_a_complete_page_that_loads_nothing(make_run, what):
    page = read(make_run(**what))
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS
    assert [link["href"] for link in page.all("a")] == [f"#{name}" for name in SECTIONS]
    assert all(image["src"].startswith("data:image/") and image["alt"] for image in page.all("img"))
    assert not page.all("script")
    assert not page.all("link")
    assert "default-src 'none'" in page.all("meta")[1]["content"]
    assert all(page.words[name].strip() for name in SECTIONS)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)


def test_the_figure_stands_beside_its_protocol_and_seeds(make_run):
    run = make_run(**SMALL, seeds=[0, 1, 2])
    summary = json.loads((run / "summary.json").read_text())
    head = read(run).words[""]
    assert f"{100 * summary['mean']:.2f} ± {100 * summary['std']:.2f} %" in head
    assert "protocol holdout" in head
    assert "seeds 0, 1, 2" in head
    assert "What the protocol holdout means." in head


def test_pictures_are_those_of_the_run(make_run):
    assert len(read(make_run()).all("img")) == 6  # loss, accuracy, objective, confusion, two of the spectrum


def test_selection_on_the_test_split_is_said_at_the_curves(make_run):
    assert "selected on the test split" in read(make_run(**SMALL, protocol="paper")).words["curves"]


def test_tables_hold_configuration_versions_data_seeds_and_command(make_run):
    page = read(make_run(**SMALL, seeds=[0, 7]))
    assert "batch_size: 16" in page.words["configuration"]
    assert "2.13.0+cpu" in page.words["reproduce"]
    assert "kernel-attention train uea/japanese_vowels" in page.words["reproduce"]
    assert "1 min 11 s" in page.words["reproduce"]
    assert "2 x Xeon, 24 GiB" in page.words["reproduce"]
    assert "370" in page.words["data"]
    rows = [line for line in page.words["seeds"].splitlines() if "evaluated" in line]
    assert [row.strip()[0] for row in rows] == ["0", "7"]


def test_text_from_data_and_recipes_is_never_markup(make_run):
    hostile = "<script>alert(1)</script>"
    run = make_run(class_names=[hostile, '"quoted" & $x_1$', "plain"])
    config = run / "config.yaml"
    config.write_text(config.read_text() + f"note: '{hostile}'\n")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"dataset": hostile, "recipe": hostile}))
    data = json.loads((run / "data.json").read_text())
    (run / "data.json").write_text(json.dumps(data | {"dataset": hostile}))
    page = read(run)
    assert not page.all("script")
    assert hostile in page.words["confusion"]
    assert hostile in page.words["configuration"]
    assert hostile in page.words["data"]
    assert hostile in page.words[""]


def test_regression_shows_its_own_metrics(make_run):
    page = read(make_run(task="regression"))
    assert "Test RMSE" in page.words[""]
    assert "no classes" in page.words["confusion"]
    assert "accuracy" not in page.text


def test_missing_objective_and_spectra_are_said(make_run):
    page = read(make_run(objective=False, spectra=False))
    assert "no objective" in page.words["objective"]
    assert "No spectra" in page.words["spectrum"]


def test_an_interrupted_run_says_how_far_it_came(make_run):
    page = read(make_run(stopped_after=3, seeds=[0, 1]))
    assert "seed 0 has completed epoch 3 of 40" in page.words[""]
    assert "seed 1 has not started" in page.words[""]
    assert "--resume" in page.words[""]
    assert "has not been evaluated" in page.words[""]
    assert len(page.all("img")) == 3


def test_a_figure_of_some_seeds_only_is_called_preliminary(make_run):
    run = make_run(seeds=[0, 1])
    (run / "summary.json").unlink()
    (run / "seed-1" / "evaluation.json").unlink()
    head = read(run).words[""]
    accuracy = json.loads((run / "seed-0" / "evaluation.json").read_text())["accuracy"]
    assert f"{100 * accuracy:.2f} %" in head
    assert "preliminary" in head
    assert "seed 1 has completed epoch 40 of 40" in head


def test_a_diverged_run_still_has_a_report(make_run):
    run = make_run(stopped_after=4)
    path = run / "seed-0" / "metrics.json"
    rows = json.loads(path.read_text())
    rows[3] = {key: value if key == "epoch" else float("nan") for key, value in rows[3].items()}
    path.write_text(json.dumps(rows))
    assert "epoch 4 of 40" in read(run).words[""]


@pytest.mark.parametrize("name", ["summary.json", "data.json", "versions.json", "config.yaml"])
@pytest.mark.parametrize("content", ["{", "[1, 2]", ""])
def test_files_that_cannot_be_read_are_named_and_the_rest_is_shown(make_run, name, content):
    run = make_run(**SMALL)
    (run / name).write_text(content)
    page = read(run)
    assert len(page.all("img")) >= 5
    if name.endswith("json"):
        assert f"{name} could not be read" in page.words[""]


@pytest.mark.parametrize("name", ["metrics.json", "evaluation.json", "spectra.json"])
@pytest.mark.parametrize(
    "content", ["{", "3", '[{"epoch": 1, "train_loss": "x"}]', '{"layers": [{"layer": 0}]}']
)
def test_damaged_files_of_a_seed_do_not_spoil_the_report(make_run, name, content):
    run = make_run(**SMALL, seeds=[0, 1])
    (run / "seed-0" / name).write_text(content)
    page = read(run)
    assert [attributes["id"] for attributes in page.all("section")] == SECTIONS


def test_the_same_run_gives_the_same_bytes(make_run):
    run = make_run(**SMALL, seeds=[0, 1])
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first


def test_a_failed_write_leaves_the_old_report_and_no_litter(make_run, monkeypatch):
    run = make_run(**SMALL)
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
