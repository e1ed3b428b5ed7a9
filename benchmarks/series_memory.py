"""Memory and time of a fit of ``AttentionClassifier`` on many long series.

    python benchmarks/series_memory.py
    python benchmarks/series_memory.py --attention primal softmax --epochs 2 --output memory.jsonl

The series are generated with seed 0: 10,000 of length 1,000 with 6 channels and two classes, which a wave in
one channel tells apart. Each mechanism is fitted in a process of its own, with the default arguments but for
the number of epochs, and its line says the largest memory of that process, what of it was there before the
fit, and the seconds of the fit and of the prediction of 1,000 series. ``--patch-len 1`` gives the mechanism
1,000 tokens instead of the 125 of the default.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from pathlib import Path
from typing import Any

import numpy as np

PREDICTED = 1000
GIB = 2**30


def make_series(cases: int, length: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """X (cases, channels, length) float32 and two classes."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((cases, channels, length), dtype=np.float32)
    y = np.arange(cases) % 2
    X[y == 1, 0] += np.sin(np.linspace(0, 20 * np.pi, length, dtype=np.float32))
    return X, y


def measure(attention: str, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a fit in this process."""
    import torch

    from kernel_attention.estimators import AttentionClassifier
    from kernel_attention_lab.peak_memory import peak_resident, reset_peak_resident
    from kernel_attention_lab.training.run import machine

    torch.set_num_threads(options.threads)
    X, y = make_series(options.cases, options.length, options.channels)
    classifier = AttentionClassifier(
        attention, epochs=options.epochs, n_estimators=options.members, patch_len=options.patch_len,
        random_state=0, accelerator=options.accelerator,
    )  # fmt: skip
    before = reset_peak_resident()
    started = time.perf_counter()
    classifier.fit(X, y)
    fitted = time.perf_counter()
    accuracy = classifier.score(X[:PREDICTED], y[:PREDICTED])
    ended = time.perf_counter()
    return {
        "attention": attention,
        "cases": options.cases,
        "length": options.length,
        "channels": options.channels,
        "members": options.members,
        "epochs": options.epochs,
        "patch_len": options.patch_len,
        "peak_bytes": peak_resident(),
        "bytes_before": before,
        "fit_seconds": round(fitted - started, 1),
        "predict_seconds": round(ended - fitted, 1),
        "training_accuracy": accuracy,
        "machine": machine(),
    }


def work(attention: str, options: argparse.Namespace, results: Any) -> None:
    results.put(measure(attention, options))


def report(record: dict[str, Any]) -> str:
    sizes = [
        "?" if record[key] is None else f"{record[key] / GIB:.2f}" for key in ("peak_bytes", "bytes_before")
    ]
    return (
        f"{record['attention']}: peak {sizes[0]} GiB ({sizes[1]} before the fit), fit "
        f"{record['fit_seconds']} s for {record['epochs']} epochs of {record['members']} members, prediction "
        f"{record['predict_seconds']} s, accuracy on training cases {100 * record['training_accuracy']:.1f} %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", default=["primal", "softmax"])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--length", type=int, default=1_000)
    parser.add_argument("--channels", type=int, default=6)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--patch-len", type=int, default=0, help="steps of a token; 0: the default's choice")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--output", type=Path, help="file to which a line of JSON is added for every fit")
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for attention in options.attention:
        results = context.SimpleQueue()
        process = context.Process(target=work, args=(attention, options, results))
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit(f"{attention}: the process ended with code {process.exitcode}")
        record = results.get()
        print(report(record), flush=True)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            with options.output.open("a") as file:
                file.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
