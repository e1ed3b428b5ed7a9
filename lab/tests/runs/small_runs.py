"""Small data sets, small recipes, and what two run folders have in common."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from checkout import SOURCES as SRC

from kernel_attention_lab.cli import main
from kernel_attention_lab.runs import run

MEASURED = ("seconds", "training_seconds", "tokens_per_second", "peak_rss_mb", "peak_gpu_mb")
CHANNELS, LENGTHS = 3, (5, 11)
SMALL: dict[str, Any] = {
    "dataset": "Waves",
    "attention": {"primal": {"rank": 3, "eta": 0.1, "rank_multiplier": 2}},
    "embed_dim": 8,
    "num_heads": 2,
    "num_layers": 2,
    "feedforward_dim": 16,
    "epochs": 3,
    "batch_size": 7,
    "accelerator": "cpu",
    "threads": 1,
}


def write_recipe(path: Path, **changes: Any) -> Path:
    """A recipe small enough for a fraction of a second, as a YAML file."""
    path.write_text(yaml.safe_dump(SMALL | changes, sort_keys=False))
    return path


def write_ts(path: Path, cases: list[np.ndarray], labels: list[str], header: str) -> Path:
    """Cases (n_i, c) as a ``.ts`` file; ``header`` is the line that declares the labels."""
    lines = [
        ":".join(",".join(f"{value:.6f}" for value in channel) for channel in case.T) + f":{label}"
        for case, label in zip(cases, labels, strict=True)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "\n".join([f"@problemName {path.stem}", "@univariate false", header, "@data", *lines, ""])
    )
    return path


def make_waves(
    root: Path, name: str = "Waves", *, regression: bool = False, names: Sequence[str] = "abc"
) -> Path:
    """A data set of noisy waves of unequal length, in classes of these names or with values to predict."""
    generator = np.random.default_rng(0)
    for part, count in (("TRAIN", max(24, 2 * len(names))), ("TEST", max(15, len(names)))):
        cases, labels = [], []
        for index in range(count):
            steps = np.arange(generator.integers(*LENGTHS, endpoint=True))
            frequency = 0.5 + index % len(names) + (generator.uniform(-0.2, 0.2) if regression else 0.0)
            phases = generator.uniform(0, 1, CHANNELS)
            cases.append(
                np.sin(frequency * steps[:, None] + phases) + generator.normal(0, 0.2, (len(steps), CHANNELS))
            )
            labels.append(f"{frequency:.4f}" if regression else names[index % len(names)])
        header = "@targetlabel true" if regression else f"@classLabel true {' '.join(names)}"
        write_ts(root / name / f"{name}_{part}.ts", cases, labels, header)
    return root


def train_arguments(folder: Path, keys: dict[str, Any], root: Path | None = None) -> list[str]:
    """The command line that trains these keys into ``folder``; their recipe is written beside it."""
    folder.parent.mkdir(exist_ok=True)
    recipe = folder.with_name(f"{folder.name}.yaml")
    recipe.write_text(yaml.safe_dump(keys, sort_keys=False))
    data = [] if root is None else ["--data-root", str(root)]
    return ["train", str(recipe), "--output", str(folder), *data, "--progress", "false"]


def trained_run(folder: Path, keys: dict[str, Any], root: Path | None = None, *options: str) -> Path:
    """A finished run of these keys in ``folder``, trained in this process by the command line."""
    assert main([*train_arguments(folder, keys, root), *options]) == 0
    return folder


def train_small(folder: Path, root: Path, *options: str, **changes: Any) -> Path:
    """A finished run of the small recipe of time series."""
    return trained_run(folder, SMALL | changes, root, *options)


def read_json(path: Path) -> Any:
    """The content of a JSON file."""
    return json.loads(path.read_text())


def launch(*arguments: object, **options: Any) -> subprocess.Popen:
    """The command line in a process of its own, with one thread."""
    return subprocess.Popen(
        [sys.executable, "-m", "kernel_attention_lab", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@contextlib.contextmanager
def stopped_at(task: type, step: int) -> Iterator[None]:
    """Within the block, training with this task is interrupted as by the user, at this step of all."""
    original, calls = task.training_step, []

    def training_step(self: Any, batch: Any) -> Any:
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), signal.SIGINT)
        return original(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(task, "training_step", training_step)
        yield


def outcome(run: Path) -> dict[str, Any]:
    """All that a run folder holds and that must not depend on when it was killed: durations are left out."""
    found: dict[str, Any] = {}
    for path in sorted(path for path in run.rglob("*") if path.is_file()):
        name = path.relative_to(run).as_posix()
        if path.suffix == ".safetensors":
            found[name] = path.read_bytes()
        elif path.name == "metrics.csv":
            rows = [line.split(",") for line in path.read_text().splitlines()]
            kept = [column for column, key in enumerate(rows[0]) if key not in MEASURED]
            found[name] = [[row[column] for column in kept] for row in rows]
        elif path.suffix == ".json" and path.name != "versions.json":
            found[name] = _timeless(json.loads(path.read_text()))
        else:  # the same files at least: reports and trainer states hold times, versions hold the command
            found[name] = path.read_text() if path.suffix == ".yaml" else None
    return found


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _timeless(entry) for key, entry in value.items() if key not in MEASURED}
    return [_timeless(entry) for entry in value] if isinstance(value, list) else value


def assert_same_outcome(run: Path, reference: Path) -> None:
    """Names the first file that differs, instead of printing thousands of weights."""
    found, expected = outcome(run), outcome(reference)
    assert sorted(found) == sorted(expected)
    different = [name for name in expected if found[name] != expected[name]]
    assert not different


@pytest.fixture(scope="session")
def waves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data root with the sets Waves (three classes) and Tides (regression)."""
    root = make_waves(tmp_path_factory.mktemp("data"))
    return make_waves(root, "Tides", regression=True)


@contextlib.contextmanager
def undrawn_pages() -> Iterator[None]:
    """Within the block figures are made and not drawn, which takes most of the time of a page."""
    from kernel_attention_lab.reporting import figures

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "_render", lambda figure, kind: b"<svg/>")
        yield


@pytest.fixture(scope="session")
def trained(waves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two seeds. Only to be read."""
    with undrawn_pages():
        return train_small(tmp_path_factory.mktemp("trained") / "run", waves, "--seeds", "0", "1")


@pytest.fixture(scope="session")
def trained_regression(waves: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of a regression. Only to be read."""
    with undrawn_pages():
        return train_small(tmp_path_factory.mktemp("trained") / "tides", waves, dataset="Tides")


@pytest.fixture
def brief(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs without the pictures of their report, which take nine tenths of the time of so small a run."""
    monkeypatch.setattr(run, "write_report", lambda folder: (folder / "report.html").write_text("<html>"))


BRIEF = """
import multiprocessing
from kernel_attention_lab.runs import run

if multiprocessing.parent_process():
    run.write_report = lambda folder: None
"""
"""A plugin that does the same in the workers of a command."""
