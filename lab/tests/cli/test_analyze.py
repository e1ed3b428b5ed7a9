"""``analyze``: numbers beside the weights, figures in the report, and nothing where it was refused."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from runs.small_runs import train_small

from kernel_attention.analysis import diagnose
from kernel_attention.series import make_loader
from kernel_attention_lab.runs import analyze
from kernel_attention_lab.runs.saved import load_run


@pytest.fixture
def run(trained, here):
    return shutil.copytree(trained, here / "run")


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_analyze_writes_into_the_run(cli, run, waves, undrawn):
    before = {name: (run / name).read_bytes() for name in names(run)}
    code, out, err = cli("analyze", run, "--data-root", waves)
    assert (code, err) == (0, "")
    assert "Waves, seed 0" in out
    assert "Waves, seed 1" in out
    assert "report: " in out
    added = set(names(run)) - set(before)
    assert added == {f"seed-{seed}/diagnostics.{kind}" for seed in (0, 1) for kind in ("json", "npz")}
    changed = {name for name in before if (run / name).read_bytes() != before[name]}
    assert changed == {"report.html"}
    assert "What the attention does" in (run / "report.html").read_text()


def test_the_numbers_are_those_of_the_python_call(cli, run, waves, monkeypatch):
    monkeypatch.setattr(analyze, "write_report", lambda folder: None)  # its pictures take most of the time
    assert cli("analyze", run, "--data-root", waves, "--layers", "-1", "--cases", 3)[0] == 0
    saved = load_run(run)
    split = saved.test_split(waves)
    cases = [split.sequences[place] for place in (0, 7, 14)]
    batches = [(batch.x, batch.attention_mask) for batch in make_loader(cases, 3)]
    expected = diagnose(saved.model(1), batches, -1)
    with np.load(run / "seed-1/diagnostics.npz", allow_pickle=False) as arrays:
        assert set(arrays.files) == set(expected.arrays())
        for name, value in expected.arrays().items():
            np.testing.assert_allclose(arrays[name], value, rtol=1e-4, atol=1e-6)
    content = json.loads((run / "seed-1/diagnostics.json").read_text())
    assert content["note"] == "3 evenly spaced sequences of the test split"
    assert [layer["name"] for layer in content["layers"]] == ["encoder.layers.1.attention"]


@pytest.fixture(scope="module")
def kept(waves, tmp_path_factory):
    """A run that kept its weights. Only to be read."""
    folder = tmp_path_factory.mktemp("kept") / "run"
    return train_small(folder, waves, attention="softmax", epochs=4, keep_weights_every=2)


def test_over_training_measures_every_kept_copy(cli, kept, waves, here, undrawn):
    run = shutil.copytree(kept, here / "run")
    code, out, err = cli("analyze", run, "--data-root", waves, "--over-training", "--cases", 3)
    assert (code, err) == (0, "")
    assert "kernel-PCA reading" in out
    content = json.loads((run / "seed-0/diagnostics_over_training.json").read_text())
    assert [entry["epoch"] for entry in content["epochs"]] == [0, 2, 4]
    saved = load_run(run)
    split = saved.test_split(waves)
    cases = [split.sequences[place] for place in (0, 7, 14)]
    batches = [(batch.x, batch.attention_mask) for batch in make_loader(cases, 3)]
    for entry in content["epochs"]:
        expected = diagnose(saved.model(0, entry["epoch"]), batches)
        for layer, record in zip(entry["layers"], expected.records(), strict=True):
            assert layer["summary"] == pytest.approx(record["summary"], rel=1e-3, abs=1e-6)
    first, last = (entry["layers"][0]["summary"] for entry in (content["epochs"][0], content["epochs"][-1]))
    assert first != last
    assert "one line per layer" in (run / "report.html").read_text()


def test_a_run_without_kept_weights_has_no_course(refused, trained, waves):
    message = refused("analyze", trained, "--data-root", waves, "--over-training")
    assert "no weights of seed 0 were kept during training; train with --keep_weights_every 1" in message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--layers", "7"], "layers: index 7 is out of range; the model has 2 attention layers"),
        (["--layers", "first-3"], "layers: 'first-3' asks for more than the model's 2 attention layers"),
        (["--layers", "head"], "unknown layer 'head'"),
        (["--layers", ","], "unknown layer ','"),
        (["--cases", "0"], "cases=0 must be a whole number of at least 1"),
        (["--cases", "many"], "--cases 'many' must be a whole number"),
        (["--output", "file.txt/out"], "output file.txt/out: cannot be written"),
        (["--layer", "0"], "analyze has no option --layer; did you mean --layers?"),
    ],
)
def test_bad_arguments(refused, trained, waves, here, options, message):
    (here / "file.txt").write_text("in the way")
    assert message in refused("analyze", trained, "--data-root", waves, *options)
