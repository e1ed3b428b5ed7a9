"""A record holds what a run folder holds, is written once, and is read back as it was."""

from __future__ import annotations

import dataclasses
import json
import shutil

import numpy as np
import pytest
import yaml
from evidence.conftest import attack_entry

from kernel_attention.errors import InputError
from kernel_attention_lab.evidence import make_records, read_records, write_records
from kernel_attention_lab.evidence.records import require_same_config


@pytest.fixture
def run(trained, tmp_path):
    """A finished run of two seeds; seed 1 was attacked."""
    folder = shutil.copytree(trained, tmp_path / "run")
    attacks = [attack_entry("fgsm", np.array([1, 0, 1])) | {"distances": {}}]
    (folder / "seed-1/robustness.json").write_text(json.dumps({"weights": "ab", "attacks": attacks}))
    return folder


def content(path):
    return json.loads(path.read_text())


def test_a_record_holds_what_the_run_holds(run):
    first, second = make_records(run, label="mine")
    versions, summary = content(run / "versions.json"), content(run / "summary.json")
    for seed, record in ((0, first), (1, second)):
        evaluation = content(run / f"seed-{seed}/evaluation.json")
        assert (record.label, record.seed, record.recipe) == ("mine", seed, summary["recipe"])
        assert record.attention == {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}}
        assert record.figures["evaluation"]["accuracy"] == evaluation["accuracy"] == summary["values"][seed]
        assert "confusion_matrix" not in record.figures["evaluation"]
        assert record.budget == {"epochs": 3, "seconds": evaluation["seconds"], "threads": 1}
        assert (record.machine, record.software["torch"]) == (versions["machine"], versions["torch"])
        assert "seeds" not in record.config
    assert "robustness" not in first.figures
    assert second.figures["robustness"] == content(run / "seed-1/robustness.json")


def test_a_record_keeps_the_course_of_the_figures_that_are_asked_for(run):
    accuracies = [row["train_accuracy"] for row in content(run / "seed-0/metrics.json")]
    record = make_records(run, course=["train_accuracy"])[0]
    assert record.figures["course"] == {"epoch": [1, 2, 3], "train_accuracy": accuracies}
    assert record.single_figures["mean_train_accuracy"] == pytest.approx(np.mean(accuracies))
    assert "course" not in make_records(run)[0].figures


def test_a_record_has_no_path_of_the_machine(run):
    config = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump(config | {"start_from": "/home/me/runs/classifier"}))
    assert make_records(run)[0].config["start_from"] == "classifier"


def test_a_run_says_when_and_with_which_code_it_was_trained(run):
    """In a clone; the revision in the folder stands before one that is given."""
    versions = content(run / "versions.json")
    (record, _) = make_records(run)
    assert record.date == versions["date"]
    assert record.date.endswith("+00:00")
    assert record.revision == versions.get("revision")
    (run / "versions.json").write_text(json.dumps(versions | {"revision": "abcdef+"}))
    assert make_records(run, revision="abc")[0].revision == "abcdef+"
    with pytest.raises(InputError, match=r"revision 123 is not that of the run, abcdef\+"):
        make_records(run, revision="123")


def test_a_run_of_an_earlier_version_is_dated_by_its_files(run):
    versions = content(run / "versions.json")
    del versions["date"]
    versions.pop("revision", None)
    (run / "versions.json").write_text(json.dumps(versions))
    (record, _) = make_records(run)
    assert record.date.startswith("20")
    assert record.revision is None


def test_records_come_back_as_they_were_written(run, tmp_path):
    records = make_records(run)
    written = write_records(records, tmp_path / "results/some")
    assert [path.name for path in written] == ["primal-0.json", "primal-1.json"]
    assert read_records(tmp_path / "results/some") == records
    assert write_records(records, tmp_path / "results/some") == [], "the same content is left as it is"


def test_other_content_is_not_replaced(run, tmp_path):
    first, second = make_records(run)
    write_records([second], tmp_path / "to")
    before = (tmp_path / "to/primal-1.json").read_bytes()
    changed = dataclasses.replace(second, figures={"evaluation": {"accuracy": 1.0}})
    with pytest.raises(InputError, match=r"primal-1\.json is there with other content; delete it first"):
        write_records([first, changed], tmp_path / "to")
    assert [path.name for path in (tmp_path / "to").iterdir()] == ["primal-1.json"], "nothing half-written"
    assert (tmp_path / "to/primal-1.json").read_bytes() == before


def test_an_unfinished_seed_has_no_record(run):
    (run / "seed-0/evaluation.json").unlink()
    assert [record.seed for record in make_records(run)] == [1]
    (run / "seed-1/evaluation.json").unlink()
    with pytest.raises(InputError, match="no finished seed in it yet"):
        make_records(run)
    (run / "summary.json").unlink()
    with pytest.raises(InputError, match=r"no summary\.json yet, so give --label"):
        make_records(run)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda record: "[]", "not a record of schema 1"),
        (lambda record: "{", "not readable as JSON"),
        (lambda record: json.dumps(record | {"schema": 2}), "not a record of schema 1"),
        (lambda record: json.dumps(record | {"extra": 2}), "not a record of schema 1"),
        (lambda record: json.dumps(record | {"config": {}}), "not a record of schema 1"),
        (
            lambda record: json.dumps(record | {"seed": 5}),
            r"holds primal, seed 5 \(expected primal-5\.json\)",
        ),
    ],
)
def test_a_file_that_is_no_record(run, tmp_path, change, said):
    write_records(make_records(run)[:1], tmp_path / "to")
    path = tmp_path / "to/primal-0.json"
    path.write_text(change(content(path)))
    with pytest.raises(InputError, match=rf"primal-0\.json: {said}"):
        read_records(tmp_path / "to")


def test_records_of_one_row_differ_in_the_seed_alone(run):
    first, second = make_records(run)
    require_same_config([first, second])
    longer = dataclasses.replace(second, config=second.config | {"epochs": 9})
    with pytest.raises(InputError, match=r"primal-0\.json and primal-1\.json differ in epochs: 3 and 9"):
        require_same_config([first, longer])
    require_same_config([first, longer], apart_from=["epochs"])


def test_a_key_that_a_later_version_added_is_no_difference(run):
    first, second = make_records(run)
    require_same_config([first, dataclasses.replace(second, config=second.config | {"new_key": 0})])
