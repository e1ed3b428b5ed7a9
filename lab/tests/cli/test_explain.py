"""``explain``, and files that an estimator saved: what a prediction of a series rests on."""

from __future__ import annotations

import csv
import io

import numpy as np
import pytest
import torch

import kernel_attention as ka
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.reporting.tables import evaluation_table

SIZES = {
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 1,
    "feedforward_dim": 8,
    "epochs": 2,
    "n_estimators": 1,
}


@pytest.fixture
def saved(here):
    """A classifier of bursts in the second half of channel b, and a table of two cases."""
    rng = np.random.default_rng(0)
    X = 0.1 * rng.standard_normal((24, 2, 12))
    y = np.array(["calm", "burst"] * 12)
    X[1::2, 1, 8] += 3
    clf = ka.AttentionClassifier({"primal": {"eta": 0.1}}, stem="linear", random_state=0, **SIZES).fit(X, y)
    clf.save(here / "clf.safetensors")
    rows = [["id", "t", "a", "b"]]
    rows += [[f"case {k}", t, *X[k, :, t]] for k in range(2) for t in range(12)]
    with (here / "new.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)
    return clf, X


COLUMNS = ("--case_column", "id", "--time_column", "t")


def test_a_saved_classifier_predicts_a_table(saved, cli, refused):
    clf, X = saved
    code, out, _ = cli("predict", "clf.safetensors", "new.csv", *COLUMNS)
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["case"] for row in rows] == ["case 0", "case 1"]
    assert [row["prediction"] for row in rows] == clf.predict(X[:2]).tolist()
    found = [[float(row["probability_burst"]), float(row["probability_calm"])] for row in rows]
    np.testing.assert_allclose(found, clf.predict_proba(X[:2]), rtol=1e-5)
    assert "channels, clf.safetensors takes 2" in refused(
        "predict", "clf.safetensors", "new.csv", *COLUMNS, "--channel_columns", "a"
    )


def test_a_saved_classifier_is_explained(saved, cli, refused, here):
    code, out, _ = cli("explain", "clf.safetensors", "new.csv", *COLUMNS, "--case", "case 1", "--nodes", 8)
    assert code == 0
    assert "written: explanation.svg" in out
    assert (here / "explanation.svg").read_text().count("<svg") == 1
    (here / "explanation.svg").unlink()
    said = refused("explain", "clf.safetensors", "new.csv", *COLUMNS, "--case", "2")
    assert said == "case '2' is not in new.csv (it has: case 0, case 1)"
    assert "must end in .svg" in refused("explain", "clf.safetensors", "new.csv", "--output", "x.txt")


def test_a_run_is_explained(cli, refused, trained, waves, here):
    file = waves / "Waves/Waves_TEST.ts"
    code, out, _ = cli("explain", trained, file, "--case", "1", "--nodes", 4, "--output", "one.png")
    assert code == 0
    assert "case 1: " in out
    assert (here / "one.png").stat().st_size > 1000
    (here / "one.png").unlink()
    assert "a run knows its columns" in refused("explain", trained, file, "--case_column", "id")


def test_the_shares_of_a_run_sum_to_the_change_of_the_answer(trained, waves):
    from kernel_attention_lab.runs.explain import explain_run
    from kernel_attention_lab.runs.saved import load_run

    run = load_run(trained)
    found = explain_run(run, waves / "Waves/Waves_TEST.ts", "0", None, 128)
    series = found.series
    np.testing.assert_allclose(series, load_time_series("Waves", waves).test.sequences[0], rtol=1e-6)
    model = run.model().double()
    place = run.facts["class_names"].index(found.prediction)
    with torch.no_grad():
        x = torch.from_numpy(series).double()[None]
        middle, _ = model.encoder.scale_in(torch.float64)
        answers = [model(each).log_softmax(-1)[0, place].item() for each in (x, middle.expand_as(x))]
    assert found.shares.sum() == pytest.approx(answers[0] - answers[1], abs=1e-3)


def test_balanced_accuracy_is_shown_where_classes_differ_in_size():
    def figures(matrix):
        row = {"seed": 0, "accuracy": 0.9, "confusion_matrix": matrix}
        return [str(cell) for cell in evaluation_table([row], "").columns[0].cells]

    assert figures([[8, 0], [1, 1]]) == ["accuracy", "balanced accuracy"]
    assert figures([[5, 0], [1, 4]]) == ["accuracy"]
