"""Several runs in one table and one page."""

import csv
import json
from pathlib import Path

import pytest
from runs.small_runs import train_small

from kernel_attention_lab.runs import run

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture(scope="module")
def other(waves, tmp_path_factory):
    """A run that has seed 1 in common with ``trained``, and seed 2 of its own. Only to be read."""
    changes = {"attention": "softmax", "learning_rate": 0.01}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "write_report", lambda folder: None)
        return train_small(tmp_path_factory.mktemp("other") / "other", waves, "--seeds", "1", "2", **changes)


def accuracy(run, seed):
    return json.loads((run / f"seed-{seed}" / "evaluation.json").read_text())["accuracy"]


def test_runs_stand_in_one_table_and_one_page(cli, trained, other, here):
    code, out, err = cli("compare", trained, other, "--table", "all.csv")
    assert (code, err) == (0, "")
    assert "page: runs/comparison.html" in out
    first, second = csv.DictReader((here / "all.csv").read_text().splitlines())
    assert (first["run"], second["run"], second["attention"]) == ("run", "other", "softmax")
    assert second["learning_rate"] == "0.01"
    assert "epochs" not in first, "the same in both"
    assert float(first["seed_0"]) == accuracy(trained, 0)
    assert second["seed_0"] == "", "it has no seed 0"
    assert float(second["mean"]) == pytest.approx((accuracy(other, 1) + accuracy(other, 2)) / 2)
    assert float(second["difference"]) == pytest.approx(accuracy(other, 1) - accuracy(trained, 1))
    assert (first["difference"], second["shared_seeds"]) == ("", "1")
    assert "other minus run: " in out
    assert "of the exact sign-flip test over cases" in out
    page = (here / "runs" / "comparison.html").read_text()
    assert f"{100 * accuracy(other, 2):.2f} %" in page
    assert page.count("<img ") >= 3, "the seeds, the loss and the accuracy"
    assert "<script" not in page


def test_runs_that_cannot_stand_together_are_refused(refused, trained, trained_regression):
    assert "at least two runs" in refused("compare", trained)
    assert "is given twice" in refused("compare", trained, trained)
    Path("loop").symlink_to("loop")
    assert "loop" in refused("compare", trained, "loop")
    message = refused("compare", trained, trained_regression)
    assert "different figures" in message
    assert "rmse" in message
    assert "does not exist" in refused("compare", trained, "nowhere")
    assert ".csv or .json" in refused("compare", trained, trained_regression, "--table", "all.txt")
