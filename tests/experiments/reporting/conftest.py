"""Run folders as training writes them, with made-up but plausible numbers."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

CONFIG = """\
recipe: uea/japanese_vowels
dataset: JapaneseVowels
protocol: {protocol}
seeds: {seeds}
training:
  epochs: {epochs}
  batch_size: 16
model:
  attention:
    primal: {{rank: 20, eta: 0.1}}
  num_layers: 2
"""


def write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content), encoding="utf-8")


def _metrics(
    rng: np.random.Generator, epochs: int, task: str, layers: int, every: int
) -> list[dict[str, Any]]:
    rows = []
    for epoch in range(1, epochs + 1):
        decay = float(np.exp(-epoch / (0.15 * epochs + 1)))
        row: dict[str, Any] = {"epoch": epoch, "train_loss": 2.2 * decay + 0.02 + 0.05 * decay * rng.normal()}
        if task == "classification":
            row["train_accuracy"] = min(1.0, 0.99 - 0.8 * decay + 0.01 * rng.normal())
        for layer in range(layers):
            row[f"objective_layer_{layer}"] = (1.5 + layer) * decay**2 - 0.05 + 0.01 * rng.normal()
        if epoch % every == 0:
            row["val_loss"] = 2.0 * decay + 0.12 + 0.02 * rng.normal()
            if task == "classification":
                row["val_accuracy"] = min(1.0, 0.97 - 0.75 * decay + 0.01 * rng.normal())
            else:
                row["val_rmse"], row["val_r2"] = row["val_loss"] ** 0.5, 1 - row["val_loss"] / 2.4
        row["seconds"] = 0.4 + 0.05 * rng.random()
        rows.append(row)
    return rows


def _confusion(rng: np.random.Generator, classes: int, cases: int) -> list[list[int]]:
    true = rng.integers(0, classes, cases)
    guess = np.where(rng.random(cases) < 0.03, rng.integers(0, classes, cases), true)
    counts = np.zeros((classes, classes), int)
    np.add.at(counts, (true, guess), 1)
    return counts.tolist()


def _spectra(rng: np.random.Generator, layers: int, heads: int, values: int) -> dict[str, Any]:
    entries = []
    for layer in range(layers):
        rates = rng.uniform(0.25, 0.5, heads) + 0.1 * layer
        sigma = [np.exp(-rate * np.arange(values)).tolist() for rate in rates]
        entries.append({"layer": layer, "mechanism": "primal", "singular_values": sigma})
    return {"layers": entries, "note": "Mean over 64 sequences of the test split of sigma / sigma_1."}


def build_run(
    folder: Path,
    *,
    task: str = "classification",
    seeds: Sequence[int] = (0,),
    epochs: int = 40,
    layers: int = 2,
    heads: int = 8,
    class_names: Sequence[str] = tuple("123456789"),
    objective: bool = True,
    spectra: bool = True,
    protocol: str = "holdout",
    stopped_after: int | None = None,
    every: int = 1,
) -> Path:
    """Writes a run folder; with ``stopped_after`` one that was interrupted in its first seed."""
    folder.mkdir(parents=True)
    config = CONFIG.format(protocol=protocol, seeds=list(seeds), epochs=epochs)
    (folder / "config.yaml").write_text(config, encoding="utf-8")
    versions = {
        "python": "3.11.7",
        "torch": "2.13.0+cpu",
        "kernel_attention": "0.1.0",
        "platform": "Linux x86_64",
    }
    write_json(folder / "versions.json", versions | {"command": "kernel-attention train uea/japanese_vowels"})
    data = {"dataset": "JapaneseVowels", "task": task, "num_features": 12, "max_len": 29, "train_cases": 270}
    names = list(class_names) if task == "classification" else []
    scaling = {"mean": np.linspace(-1, 1, 12).tolist(), "std": np.linspace(0.1, 0.4, 12).tolist()}
    write_json(folder / "data.json", data | {"test_cases": 370, "class_names": names} | scaling)
    values = []
    metric = "accuracy" if task == "classification" else "rmse"
    for seed in seeds if stopped_after is None else seeds[:1]:
        rng = np.random.default_rng(seed)
        place = folder / f"seed-{seed}"
        place.mkdir()
        rows = _metrics(rng, epochs, task, layers if objective else 0, every)[:stopped_after]
        write_json(place / "metrics.json", rows)
        with (place / "metrics.csv").open("w", newline="") as stream:
            writer = csv.DictWriter(stream, list(dict.fromkeys(key for row in rows for key in row)))
            writer.writeheader()
            writer.writerows(rows)
        if stopped_after is not None:
            continue
        evaluation = {"protocol": protocol, "split": "test", "loss": 0.11, "best_epoch": epochs * 3 // 4}
        evaluation |= {"cases": 370, "seconds": 1.2}
        if task == "classification":
            counts = np.array(_confusion(rng, len(names), 370))
            evaluation |= {"accuracy": np.trace(counts) / counts.sum(), "confusion_matrix": counts.tolist()}
        else:
            evaluation |= {"rmse": 0.31 + 0.02 * rng.random(), "r2": 0.84}
        write_json(place / "evaluation.json", evaluation)
        values.append(evaluation[metric])
        if spectra:
            write_json(place / "spectra.json", _spectra(rng, layers, heads, values=29))
    if stopped_after is None:
        summary = {"recipe": "uea/japanese_vowels", "dataset": "JapaneseVowels", "protocol": protocol}
        summary |= {"attention": {"primal": {"rank": 20, "eta": 0.1}}, "seeds": list(seeds), "metric": metric}
        summary |= {"protocol_text": f"What the protocol {protocol} means.", "values": values}
        summary |= {
            "mean": float(np.mean(values)),
            "std": float(np.std(values, ddof=1)) if len(values) > 1 else None,
        }
        write_json(folder / "summary.json", summary | {"seconds": 71.4, "machine": "2 x Xeon, 24 GiB"})
    return folder


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run(**what)`` writes a run folder; the arguments are those of ``build_run``."""
    return lambda **what: build_run(tmp_path / "run", **what)
