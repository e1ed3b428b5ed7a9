"""Several processes train what one would train with their batches together, and each task's run goes on.

Dropout is 0: the processes have random numbers of their own. A figure of a run is a mean in float32 of terms
that are added up in another order, some hundred roundings of 6e-8 each; the optimizers pass on what differs.
"""

from __future__ import annotations

import csv
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data.segmentation.pairs import pair_files, write_files
from runs.small_runs import (
    MEASURED,
    SMALL,
    SRC,
    assert_same_outcome,
    launch,
    make_waves,
    read_json,
    train_arguments,
    trained_run,
)
from tasks.decision_data import DECISIONS, make_decisions
from tasks.image_data import IMAGES, make_images
from tasks.text_data import LANGUAGE, make_text
from tasks.token_data import TOKENS, make_tokens

from kernel_attention.errors import InputError
from kernel_attention.series import make_loader
from kernel_attention.training.checkpoint import read_state
from kernel_attention.training.samplers import shared_loader
from kernel_attention.weights import read_weights
from kernel_attention_lab.cli import main

pytestmark = [
    pytest.mark.usefixtures("brief"),
    pytest.mark.skipif(not torch.distributed.is_available(), reason="no torch.distributed"),
]

ROUNDING = 1e-5
POSITIONS: dict[str, Any] = {
    "task": "sequence_labels", "dataset": "mqar", "options": {"vocabulary": 12},
    "train_at": [{"length": 8, "items": 1}, {"length": 12, "items": 3}],
    "attention": {"primal": {"rank": 3, "eta": 0.1, "data_dependent": False}}, "embed_dim": 8, "num_heads": 2,
    "num_layers": 1, "feedforward_dim": 16, "steps": 6, "evaluate_every": 3, "batch_size": 7,
    "evaluation_cases": 9, "accelerator": "cpu", "threads": 1,
}  # fmt: skip
SEGMENTS: dict[str, Any] = {
    "task": "segmentation", "dataset": "stripes", "image_size": 0, "crop_size": [12, 14], "patch_size": 2,
    "attention": {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}}, "embed_dim": 8, "num_heads": 2,
    "num_layers": 1, "feedforward_dim": 16, "drop_path": 0.0, "epochs": 2, "batch_size": 4,
    "optimizer": "adamw", "accelerator": "cpu", "threads": 1,
}  # fmt: skip
PRIMAL = {"attention": {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}}}
PLAIN = {"augmentation": "none", "random_erasing": 0.0, "mixup": 0.0, "cutmix": 0.0}


def make_stripes(root: Path) -> Path:
    """A data root with ``stripes``: images with label maps, in which some pixels are void."""
    write_files(root / "stripes", pair_files({"train": 14, "val": 5, "test": 6}))
    return root


TASKS = {
    "time series": (SMALL, make_waves),
    "regression": (
        SMALL | {"dataset": "Tides"}, lambda root: make_waves(root, "Tides", regression=True)
    ),
    "images": (IMAGES | PRIMAL | PLAIN, make_images),
    "segmentation": (SEGMENTS, make_stripes),
    "language": (LANGUAGE, make_text),
    "tokens": (TOKENS | {"dataset": "sst2"}, make_tokens),
    "decisions": (DECISIONS, make_decisions),
    "positions": (POSITIONS, lambda root: root),
}  # fmt: skip


def several(folder: Path, keys: dict[str, Any], root: Path, *options: str, seconds: float = 240) -> str:
    """Train in a process of its own, which starts the others; what it says on standard error."""
    process = launch(*train_arguments(folder, keys, root), *options)
    try:
        said = process.communicate(timeout=seconds)[1]
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said


def rows(folder: Path) -> list[dict[str, float]]:
    """The figures of every round that are not durations."""
    with (folder / "seed-0/metrics.csv").open() as file:
        return [
            {name: float(value) for name, value in row.items() if name not in MEASURED and value}
            for row in csv.DictReader(file)
        ]


def assert_alike(found: Path, expected: Path, rounding: float = ROUNDING) -> None:
    """The same figures and weights up to rounding."""
    for row, wanted in zip(rows(found), rows(expected), strict=True):
        assert row == pytest.approx(wanted, rel=rounding, abs=rounding)
    weights, wanted = (read_weights(folder / "seed-0/last.safetensors") for folder in (found, expected))
    for name, value in wanted.items():
        if name.endswith("k_proj.bias"):
            continue  # no softmax depends on it: its gradient is rounding, which Adam divides by its size
        torch.testing.assert_close(weights[name], value, rtol=10 * rounding, atol=10 * rounding)


def halved(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"dropout": 0.0, "batch_size": keys["batch_size"]}


def doubled(keys: dict[str, Any]) -> dict[str, Any]:
    return keys | {"dropout": 0.0, "batch_size": 2 * keys["batch_size"]}


@pytest.mark.parametrize("keys", [{}, {"optimizer": "adamw", "gradient_clip": 0.1}], ids=["radam", "clipped"])
def test_two_passes_train_as_one_with_twice_the_batch(keys, tmp_path):
    """Without J, whose square is taken in every pass."""
    plain = SMALL | {"attention": {"primal": {"rank": 3, "rank_multiplier": 2}}} | keys
    root = make_waves(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(plain), root)
    assert_alike(trained_run(tmp_path / "two", halved(plain), root, "--accumulate", "2"), one)


@pytest.mark.slow
@pytest.mark.parametrize("name", TASKS)
def test_every_task_trains_as_one_process_does(name, tmp_path):
    keys, make = TASKS[name]
    (tmp_path / "data").mkdir()
    root = make(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(keys), root)
    said = several(tmp_path / "two", halved(keys), root, "--devices", "2")
    assert_alike(tmp_path / "two", one)
    assert (tmp_path / "two/report.html").is_file()
    assert read_json(tmp_path / "two/summary.json")["processes"] == 2
    if (
        name == "time series"
    ):  # the last batch has 5 of 14 cases, so the processes have unequal numbers of them
        assert "note: a step has 14 sequences (7 in a batch x 2 processes, ddp)" in said


LONG = SMALL | {"pooling": "mean"}
MIXED = {"positions": "fixed", "attention": ["linear", {"primal": {"rank": 3, "eta": 0.1}}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "options"),
    [
        (SMALL, ["--strategy", "fsdp"]),
        (SMALL | {"optimizer": "adamw", "gradient_clip": 0.1}, ["--strategy", "fsdp"]),
        (SMALL | {"attention": "multilinear"}, []),
        (SMALL | {"attention": {"primal": {"rank": 3, "eta": 0.1, "objective_form": "sum"}}}, []),
    ],
    ids=["fsdp", "fsdp, clipped", "multilinear", "sum"],
)
def test_other_strategies_and_objectives_train_as_one_process_does(keys, options, tmp_path):
    root = make_waves(tmp_path / "data")
    one = trained_run(tmp_path / "one", doubled(keys), root)
    several(tmp_path / "two", halved(keys), root, "--devices", "2", *options)
    assert_alike(tmp_path / "two", one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "make", "devices"),
    [
        (LONG, make_waves, 2),
        (LONG | MIXED, make_waves, 3),
        (LONG, make_waves, 4),
        (TOKENS | {"dataset": "sst2"}, make_tokens, 2),
        (TOKENS | {"dataset": "sst2", "attention": "linear", "is_causal": True}, make_tokens, 2),
    ],
    ids=["series", "three parts", "two copies", "tokens", "causal"],
)  # fmt: skip
def test_processes_that_share_sequences_train_as_one_does(keys, make, devices, tmp_path):
    """With four processes, two share each sequence, and the two pairs have sequences of their own."""
    (tmp_path / "data").mkdir()
    root = make(tmp_path / "data")
    shards = 2 if devices == 4 else devices
    whole = keys | {"dropout": 0.0, "batch_size": keys["batch_size"] * devices // shards}
    one = trained_run(tmp_path / "one", whole, root)
    options = ("--devices", str(devices), "--sequence-shards", str(shards))
    several(tmp_path / "several", halved(keys), root, *options)
    assert_alike(tmp_path / "several", one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "make"),
    [(SMALL, make_waves), (TOKENS | {"dataset": "sst2"}, make_tokens), (LANGUAGE, make_text)],
    ids=["time series", "tokens", "language"],
)
def test_torchrun_starts_what_a_run_starts_alone(keys, make, tmp_path):
    """Bit for bit, and dropout too; the processes take their number from torchrun."""
    (tmp_path / "data").mkdir()
    root = make(tmp_path / "data")
    several(tmp_path / "alone", keys, root, "--devices", "2")
    arguments = train_arguments(tmp_path / "run", keys, root)
    done = torchrun(*arguments)
    assert done.returncode == 0, done.stderr
    assert read_json(tmp_path / "run/summary.json")["processes"] == 2
    assert rows(tmp_path / "run") == rows(tmp_path / "alone")
    refused = torchrun("train", "--resume", trained_run(tmp_path / "one", keys, root))
    assert "torchrun has started 2 processes, 2 on this machine, and the recipe asks for devices=1" in (
        refused.stderr
    )


def torchrun(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The command line in two processes of torchrun."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port),
         "-m", "kernel_attention_lab", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "make", "options"),
    [
        (SMALL | {"dropout": 0.2}, make_waves, []),
        (SMALL | {"dropout": 0.2}, make_waves, ["--strategy", "fsdp"]),
        (LANGUAGE, make_text, []),
        (TOKENS | {"dataset": "sst2"}, make_tokens, ["--sequence-shards", "2"]),
    ],
    ids=["time series", "fsdp", "language", "parts of sequences"],
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_stopped_and_resumed_the_run_ends_the_same(keys, make, options, number, tmp_path):
    """Bit for bit, the dropout of every process included; nothing that was started outlives the run."""
    (tmp_path / "data").mkdir()
    root = make(tmp_path / "data")
    keys = keys | ({"steps": 120, "evaluate_every": 40} if "steps" in keys else {"epochs": 30})
    options = ["--devices", "2", *options]
    several(tmp_path / "whole" / "run", keys, root, *options)
    process = launch(*train_arguments(tmp_path / "run", keys, root), *options)
    deadline = time.monotonic() + 200
    while not (tmp_path / "run/seed-0/metrics.json").exists():  # a round is done, more are to come
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.002)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    process.send_signal(number)
    said = process.communicate(timeout=100)[1]
    assert not (tmp_path / "run/summary.json").exists(), "it was to be stopped before its end"
    if number == signal.SIGINT:
        assert process.returncode == 1
        assert "interrupted\nsaved: " in said
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < deadline, "a process outlives the run"
        time.sleep(0.05)
    resumed = launch("train", "--resume", tmp_path / "run", "--data-root", root, "--progress", "false")
    said = resumed.communicate(timeout=200)[1]
    assert resumed.returncode == 0, said
    assert_same_outcome(tmp_path / "run", tmp_path / "whole" / "run")


@pytest.mark.slow
def test_a_process_that_fails_ends_the_run_and_is_named(tmp_path):
    """The second process is killed."""
    root = make_waves(tmp_path / "data")
    process = launch(*train_arguments(tmp_path / "run", SMALL | {"epochs": 10_000}, root), "--devices", "2")
    deadline = time.monotonic() + 200
    while not (tmp_path / "run/seed-0/metrics.json").exists():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline
        time.sleep(0.01)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    (child,) = [pid for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    os.kill(int(child), signal.SIGKILL)
    said = process.communicate(timeout=100)[1]
    assert process.returncode == 1
    assert "failed: ProcessFailed: process 1 ended with exit code -9" in said
    assert "resume: kernel-attention train --resume" in said


@pytest.mark.parametrize("cases", [1, 5, 14, 15])
@pytest.mark.parametrize(("shares", "passes"), [(1, 2), (2, 1), (3, 2)])
def test_the_shares_of_a_batch_are_the_batch(cases, shares, passes):
    sequences = [np.full((3, 2), number, dtype=np.float32) for number in range(cases)]
    batches = list(make_loader(sequences, 7))
    parts = [list(shared_loader(make_loader(sequences, 7), share, shares, passes)) for share in range(shares)]
    for number, batch in enumerate(batches):
        own = [part for share in parts for part in share[number * passes : (number + 1) * passes]]
        assert len(own) == shares * passes, "every process does the same number of passes"
        together = torch.cat([part.batch.x for part in own if part.counts])
        assert torch.equal(together, batch.x)
        sizes = [len(part.batch.x) if part.counts else 0 for part in own]
        assert max(sizes) - min(sizes) <= 1
        assert all(len(part.batch.x) == 1 for part in own if not part.counts)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--devices", "2", "--sequence-shards", "3"], "sequence_shards=3 must divide the number of"),
        (["--devices", "2", "--sequence-shards", "2"], r"pooling='flatten' reads all tokens"),
        (["--devices", "2", "--sequence-shards", "2", "--pooling", "mean", "--attention", "softmax"],
         "softmax needs every key|every key"),
        (["--devices", "2", "--sequence-shards", "2", "--pooling", "mean", "--stem", "convolution"],
         "stem='convolution' reads tokens of several parts"),
        (["--devices", "2", "--sequence-shards", "2", "--pooling", "mean", "--mixup", "0.2"],
         "they change whole series"),
        (["--devices", "2", "--strategy", "fsdp", "--ema-decay", "0.9"], "moving average needs whole"),
        (["--num-nodes", "2"], "start the run on every machine with torchrun --nnodes 2"),
        (["--devices", "2", "--strategy", "fsdp", "--sequence-shards", "2"], "accepted: strategy='ddp'"),
    ],
)  # fmt: skip
def test_what_several_processes_cannot_do_is_refused_before_anything_is_written(
    options, said, waves, tmp_path, capsys
):
    assert main([*train_arguments(tmp_path / "run", SMALL, waves), *options]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_a_task_whose_sequences_are_not_divided_says_so(tmp_path, capsys):
    (tmp_path / "data").mkdir()
    arguments = train_arguments(tmp_path / "run", LANGUAGE, make_text(tmp_path / "data"))
    assert main([*arguments, "--devices", "2", "--sequence-shards", "2"]) == 2
    assert "task language does not divide its sequences" in capsys.readouterr().err


def test_a_state_of_an_earlier_version_is_refused(tmp_path):
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": {}}, tmp_path / "last.ckpt")
    with pytest.raises(InputError, match="written by an earlier version; only that version can resume it"):
        read_state(tmp_path / "last.ckpt")
