"""Loggers are told what the run folder holds, and change nothing in it."""

from __future__ import annotations

import csv
import importlib.util
import json
import struct

import pytest
import torch
from runs.small_runs import SMALL, stopped_at, train_small, write_recipe
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
