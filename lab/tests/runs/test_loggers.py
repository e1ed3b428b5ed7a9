"""Loggers are told what the run folder holds, and change nothing in it."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct

import pytest
import torch
from runs.small_runs import SMALL, launch, stopped_at, train_arguments, train_small, write_recipe
from safetensors.torch import load_file

from kernel_attention.series.task import SequenceTask
from kernel_attention_lab.cli import main

pytestmark = pytest.mark.usefixtures("brief")


def told(folder):
    """{name: {step: value}} of TensorBoard's event files."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[str, dict[int, float]] = {}
    for path in sorted(folder.glob("events.*")):
        data = path.read_bytes()
        while data:  # length, its checksum, the event, its checksum
            (length,) = struct.unpack("<Q", data[:8])
            event = Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            for value in event.summary.value:
                if value.WhichOneof("value") == "simple_value":
                    found.setdefault(value.tag, {})[event.step] = value.simple_value
    return found


def rows(folder):
    with (folder / "seed-0/metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_tensorboard_is_told_every_row_and_the_result(trained, waves, tmp_path):
    folder = train_small(tmp_path / "run", waves, loggers=["tensorboard"])
    found = told(folder / "seed-0/tensorboard")
    for name in ("train_loss", "val_loss", "val_accuracy"):
        assert list(found[name].values()) == pytest.approx(
            [float(row[name]) for row in rows(folder)], rel=1e-6
        )
    result = json.loads((folder / "seed-0/evaluation.json").read_text())
    assert list(found["result/accuracy"].values()) == [pytest.approx(result["accuracy"], rel=1e-6)]
    weights = [load_file(run / "seed-0/last.safetensors") for run in (trained, folder)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_a_resumed_run_goes_on_in_the_same_place(waves, tmp_path):
    recipe, folder = write_recipe(tmp_path / "run.yaml", loggers=["tensorboard"]), tmp_path / "run"
    command = ["--data-root", str(waves), "--progress", "false"]
    with stopped_at(SequenceTask, 8):
        assert main(["train", str(recipe), "--output", str(folder), *command]) != 0
    assert main(["train", "--resume", str(folder), *command]) == 0
    found = told(folder / "seed-0/tensorboard")
    assert len(found["val_loss"]) == len(rows(folder)) == SMALL["epochs"]


@pytest.mark.parametrize("name", ["mlflow", "wandb"])
def test_a_logger_that_is_not_installed_is_named_before_anything_is_written(name, waves, tmp_path, capsys):
    if importlib.util.find_spec(name):
        pytest.skip(f"{name} is installed")
    recipe, folder = write_recipe(tmp_path / "run.yaml", loggers=[name]), tmp_path / "run"
    assert main(["train", str(recipe), "--output", str(folder), "--data-root", str(waves)]) == 2
    assert f"loggers={name}: needs {name}, which is not installed" in capsys.readouterr().err
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own, about its database
def test_mlflow_is_told_every_row_by_one_of_two_processes(waves, tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    place = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", place)
    folder = trained_by_two(tmp_path / "run", waves, "mlflow")
    client = mlflow.MlflowClient(place)
    (experiment,) = [each for each in client.search_experiments() if each.name == "run"]
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    told = [metric.value for metric in client.get_metric_history(run.info.run_id, "val_loss")]
    assert told == [float(row["val_loss"]) for row in rows(folder)]


@pytest.mark.slow
def test_wandb_is_told_by_one_of_two_processes(waves, tmp_path, monkeypatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    folder = trained_by_two(tmp_path / "run", waves, "wandb")
    known = json.loads((folder / "seed-0/loggers.json").read_text())["wandb"]
    assert [path.name.rsplit("-", 1)[1] for path in (folder / "seed-0/wandb").glob("offline-run-*")] == [
        known
    ]


def trained_by_two(folder, root, logger):
    """The folder of a small run of two processes that tells a logger."""
    keys = SMALL | {"loggers": [logger]}
    process = launch(*train_arguments(folder, keys, root), "--devices", "2")
    try:
        said = process.communicate(timeout=240)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return folder
