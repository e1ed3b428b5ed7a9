"""Data that cannot be trained on or predicted: one clear line, exit code 2, nothing written."""

from __future__ import annotations

import json
import math
import re
import shutil
import zipfile

import numpy as np
import pytest
import torch
from runs.small_runs import CHANNELS, LENGTHS, make_waves, write_recipe, write_ts


@pytest.fixture
def broken(tmp_path):
    """A function that makes a data root whose training or test file was changed by a function of its text."""

    def make(part, change):
        root = make_waves(tmp_path / "broken")
        path = root / "Waves" / f"Waves_{part}.ts"
        path.write_text(change(path.read_text()))
        return root

    return make


def line(number, change):
    """Changes one line of a text; the header has four."""

    def apply(text):
        lines = text.split("\n")
        lines[number] = change(lines[number])
        return "\n".join(lines)

    return apply


def first_value(value):
    """Changes the first value of a case."""
    return lambda case: value + case[case.index(",") :]


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("TRAIN", line(6, lambda case: case[: len(case) // 2]), "line 7: "),
        ("TEST", line(5, first_value("NaN")), "missing value (NaN) in case 1, channel 0, step 0"),
        ("TRAIN", lambda text: re.sub(r".*:c\n", "", text), "labels unseen in training: c"),
    ],
)  # fmt: skip
def test_training_refuses(part, change, message, broken, refused, tmp_path):
    root, recipe = broken(part, change), write_recipe(tmp_path / "recipe.yaml")
    assert message in refused("train", recipe, "--data-root", root, "--output", "run")


@pytest.mark.usefixtures("brief")
def test_nan_is_interpolated_where_asked(broken, cli, tmp_path):
    root = broken("TRAIN", line(5, first_value("NaN")))
    recipe = write_recipe(tmp_path / "recipe.yaml", epochs=1)
    options = ("--data-root", root, "--output", "run", "--progress", "false", "--missing", "interpolate")
    assert cli("train", recipe, *options)[0] == 0


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((2, CHANNELS + 1, LENGTHS[1]), f"case 0 has {CHANNELS + 1} channels, the model takes {CHANNELS}"),
        (
            (2, CHANNELS, LENGTHS[1] + 1),
            f"case 0 has {LENGTHS[1] + 1} steps, the model takes at most {LENGTHS[1]}",
        ),
    ],
)
def test_prediction_refuses_arrays(shape, message, refused, trained, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros(shape))
    assert message in refused("predict", trained, tmp_path / "x.npy", "--output", "out.csv")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.npy", None, "does not exist"),
        ("x.npz", b"PK\x03\x04 broken", "is not a readable .npz file"),
        ("x.ts", b"@data\n1,2:x,4:5,6\n", "line 2: 'x' in channel 1, step 0 is not a number"),
        ("x.parquet", b"PAR1", "is not a readable Parquet file"),
    ],
)
def test_prediction_refuses_files(name, content, message, refused, trained, tmp_path):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in refused("predict", trained, tmp_path / name, "--output", "out.csv")


def header(shape, version=(1, 0)):
    """The header of a float64 array of this shape, and no values."""
    text = repr({"descr": "<f8", "fortran_order": False, "shape": shape}).encode()
    length = len(text).to_bytes(2 if version == (1, 0) else 4, "little")
    return np.lib.format.magic(*version) + length + text


@pytest.mark.parametrize(
    ("shape", "version"),
    [((10**12, CHANNELS, 4), (1, 0)), ((10**30, 1), (2, 0)), ((2, CHANNELS, 4), (3, 0))],
    ids=str,
)
def test_an_array_that_claims_more_than_its_file_holds(shape, version, refused, trained, tmp_path):
    content = header(shape, version)
    (tmp_path / "x.npy").write_bytes(content + bytes(8))
    with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
        archive.writestr("X.npy", content + bytes(8))
    for name in ("x.npy", "x.npz"):
        message = refused("predict", trained, tmp_path / name)
        assert f"its header says shape {shape} of float64, {8 * math.prod(shape)} bytes; it has 8" in message


def test_whole_arrays_of_every_version_are_read(cli, trained, tmp_path):
    values = np.random.default_rng(0).standard_normal((2, CHANNELS, 4))
    np.savez_compressed(tmp_path / "x.npz", X=np.asfortranarray(values), y=np.array([0, 1]), more=np.zeros(3))
    with (tmp_path / "x.npy").open("wb") as file:
        np.lib.format.write_array(file, values, version=(3, 0))
    outputs = [cli("predict", trained, tmp_path / name) for name in ("x.npy", "x.npz")]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0


@pytest.mark.parametrize("value", ["-1e20", "3e38"])
def test_finite_values_that_overflow_in_the_model(value, refused, trained, broken, tmp_path):
    """A squared 1e20 is infinite in float32: a class would come out all the same, with NaN behind it."""
    cases = np.zeros((3, CHANNELS, 4))
    cases[2, 1, 3] = float(value)
    np.save(tmp_path / "x.npy", cases)
    message = refused("predict", trained, tmp_path / "x.npy")
    assert f"case 2 of the sequences: value {float(np.float32(value)):g} in channel 1, step 3 is " in message
    root = broken("TEST", line(5, first_value(value)))
    assert f"case 1 of the sequences: value {float(np.float32(value)):g} in channel 0, step 0" in refused(
        "evaluate", trained, "--data-root", root
    )
    recipe = write_recipe(tmp_path / "recipe.yaml")
    message = refused("train", recipe, "--data-root", root, "--output", "run")
    assert f"case 1 of the test split: value {float(np.float32(value)):g} in channel 0, step 0 is " in message


def test_large_values_that_do_not_overflow_are_answered(cli, trained, tmp_path):
    np.save(tmp_path / "x.npy", np.full((1, CHANNELS, 4), 1e14))
    code, out, _ = cli("predict", trained, tmp_path / "x.npy")
    probabilities = [float(word) for word in out.splitlines()[1].split(",")[2:]]
    assert code == 0
    assert sum(probabilities) == pytest.approx(1)


def test_missing_values_in_a_file_advise_what_can_be_done(refused, trained, tmp_path):
    cases = np.zeros((2, CHANNELS, 4))
    cases[1, 2, 3] = np.nan
    np.save(tmp_path / "x.npy", cases)
    message = refused("predict", trained, tmp_path / "x.npy")
    assert "missing value (NaN) in case 1, channel 2, step 3" in message
    assert (
        "fill such gaps in the file, or let a model learn with them: missing: interpolate in its" in message
    )


def test_figures_that_cannot_be_written(refused, trained, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, CHANNELS, 4)))
    said = refused("predict", trained, tmp_path / "x.npy", "--output", "missing/out.csv")
    assert "output missing/out.csv: cannot be written" in said


def test_evaluation_refuses_labels_it_never_saw(refused, trained, tmp_path):
    cases = [np.zeros((4, CHANNELS))] * 2
    path = write_ts(tmp_path / "x.ts", cases, ["a", "d"], "@classLabel true a d")
    assert "labels ['d'] were not seen in training (accepted: a, b, c)" in refused("evaluate", trained, path)


def test_evaluation_refuses_a_file_without_labels(refused, trained, tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((2, CHANNELS, 4)))
    assert "has no labels to evaluate against" in refused("evaluate", trained, tmp_path / "x.npy")


def test_evaluation_refuses_classes_where_values_are_predicted(refused, trained_regression, tmp_path):
    path = write_ts(tmp_path / "x.ts", [np.zeros((4, CHANNELS))], ["a"], "@classLabel true a")
    assert "the labels are not finite numbers" in refused("evaluate", trained_regression, path)


def test_evaluation_refuses_data_that_is_not_the_runs(refused, trained, broken):
    root = broken("TRAIN", lambda text: text[: text.rstrip().rindex("\n") + 1])
    assert "train_cases is 23, in the data of the run it was 24" in refused(
        "evaluate", trained, "--data-root", root
    )


@pytest.fixture
def run(trained, tmp_path):
    """A copy of a finished run, to be damaged."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("epochs: 3", "epochs: many"), "config.yaml: epochs='many' must be a whole number"),
        (
            ("epochs: 3", "epoch: 3"),
            "config.yaml: unknown key of recipe 'epoch'; did you mean 'epochs' or 'warmup_epochs'?",
        ),
        (
            ("primal:", "primall:"),
            "config.yaml: unknown attention mechanism 'primall'; did you mean 'primal'",
        ),
        (("embed_dim: 8", "embed_dim: 16"), "does not fit the run's recipe"),
        (("embed_dim: 8", "embed_dim: 80000000000"), "GiB, more than the limit of "),
        (("rank: 3", "rank: 10000000000"), "GiB, more than the limit of "),
        (
            ("num_layers: 2", "num_layers: 80000000000"),
            "num_layers=80000000000 must be a whole number between 1 and 10000",
        ),
        (
            ("threads: 1", "threads: 80000000000"),
            "threads=80000000000 must be a whole number between 0 and 4096",
        ),
    ],
)
def test_a_config_edited_by_hand(change, message, refused, run, waves):
    text = (run / "config.yaml").read_text()
    assert change[0] in text
    (run / "config.yaml").write_text(text.replace(*change))
    assert message in refused("evaluate", run, "--data-root", waves)
    if "fit" not in message:  # a finished seed's weights are not read again
        assert message in refused("train", "--resume", run, "--data-root", waves)


@pytest.mark.parametrize("key", ["max_len", "num_features"])
def test_facts_that_describe_a_model_beyond_the_machine(key, refused, run, waves):
    facts = json.loads((run / "data.json").read_text()) | {key: 10**12}
    (run / "data.json").write_text(json.dumps(facts))
    message = refused("predict", run, waves / "Waves/Waves_TEST.ts")
    assert "the model would take about " in message
    assert "GiB, more than the limit of " in message


@pytest.mark.parametrize(
    "content", ["{}", '{"accuracy": "high", "loss": 1, "seconds": 1}', '{"accuracy": 1}']
)
def test_resuming_refuses_figures_of_another_shape(content, refused, run, waves):
    path = run / "seed-0" / "evaluation.json"
    path.write_text(content)
    message = refused("train", "--resume", run, "--data-root", waves, "--progress", "false")
    assert f"{path}: does not hold the figures of a finished seed (accuracy, loss, seconds)" in message


@pytest.mark.parametrize(
    "facts",
    ["", "[]", "{}", '{"num_features": "3", "max_len": 11, "class_names": ["a"], "task": "classification"}'],
)
def test_damaged_facts(facts, refused, run, waves):
    (run / "data.json").write_text(facts)
    assert "data.json: " in refused("evaluate", run, "--data-root", waves)
    assert "data.json: " in refused("train", "--resume", run, "--data-root", waves)


def test_damaged_weights(refused, run, waves):
    path = run / "seed-1" / "best.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    assert f"{path}: not readable as safetensors" in refused("evaluate", run, "--data-root", waves)


def test_a_run_without_a_trained_seed(refused, run, waves):
    for seed in (0, 1):
        shutil.rmtree(run / f"seed-{seed}")
    assert "no trained seed in it yet" in refused("evaluate", run, "--data-root", waves)


def test_a_seed_that_is_not_there(refused, run, waves):
    message = refused("predict", run, waves / "Waves/Waves_TEST.ts", "--seed", "5")
    assert "seed=5 is not in" in message
    assert "trained: [0, 1]" in message


@pytest.mark.parametrize("damage", ["truncated", "empty", "other recipe", "other data"])
def test_resuming_refuses(damage, refused, run, waves, broken):
    (run / "seed-1" / "evaluation.json").unlink()
    checkpoint = run / "seed-1" / "last.ckpt"
    root, message = waves, "last.ckpt: truncated or not a checkpoint"
    if damage == "truncated":
        checkpoint.write_bytes(checkpoint.read_bytes()[:-100])
    elif damage == "empty":
        checkpoint.write_bytes(b"")
    elif damage == "other recipe":
        config = run / "config.yaml"
        config.write_text(config.read_text().replace("learning_rate: 0.001", "learning_rate: 0.002"))
        message = "the checkpoint was written with learning_rate=0.001, the run's config.yaml says 0.002"
    else:
        root = broken("TRAIN", lambda text: text[: text.rstrip().rindex("\n") + 1])
        message = "train_cases is 23, in the data of the run it was 24"
    assert message in refused("train", "--resume", run, "--data-root", root, "--progress", "false")


@pytest.mark.parametrize("accelerator", ["gpu", "mps"])
def test_an_accelerator_that_is_not_there(accelerator, refused, waves, tmp_path):
    if torch.cuda.is_available() or torch.backends.mps.is_available():
        pytest.skip("this machine has a GPU")
    recipe = write_recipe(tmp_path / "recipe.yaml")
    options = ("--data-root", waves, "--output", "run", "--accelerator", accelerator)
    assert f"accelerator='{accelerator}' cannot be used here: " in refused("train", recipe, *options)
