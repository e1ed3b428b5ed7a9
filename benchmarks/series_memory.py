"""Memory and time of a fit of ``AttentionClassifier`` on many long series.

    python benchmarks/series_memory.py --attention primal softmax --epochs 2 --out memory.json

The series are generated with seed 0: 10,000 of length 1,000 with 6 channels and two classes, which a wave in
one channel tells apart. Each mechanism is fitted in a process of its own, with the default arguments but for
the number of epochs: the largest memory of that process, what of it was there before the fit, and the seconds
of the fit and of the prediction of 1,000 series. ``--patch-len 1`` gives the mechanism 1,000 tokens instead
of the 125 of the default.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
from processes import in_processes

PREDICTED = 1000


def make_series(cases: int, length: int, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """X (cases, channels, length) float32 and two classes."""
    generator = np.random.default_rng(0)
    X = generator.standard_normal((cases, channels, length), dtype=np.float32)
    y = np.arange(cases) % 2
    X[y == 1, 0] += np.sin(np.linspace(0, 20 * np.pi, length, dtype=np.float32))
    return X, y


def fit(rank: int, world: int, attention: str, options: argparse.Namespace, results: Any) -> None:
    """Measure a fit in this process."""
    import torch

    from kernel_attention.estimators import AttentionClassifier
    from kernel_attention_lab.peak_memory import peak_resident, reset_peak_resident

    torch.set_num_threads(options.threads)
    X, y = make_series(options.cases, options.length, options.channels)
    given = {"epochs": options.epochs, "n_estimators": options.members, "patch_len": options.patch_len}
    classifier = AttentionClassifier(attention, random_state=0, accelerator=options.accelerator, **given)
    before = reset_peak_resident()
    started = time.perf_counter()
    classifier.fit(X, y)
    fitted = time.perf_counter()
    accuracy = classifier.score(X[:PREDICTED], y[:PREDICTED])
    seconds = {"fit_seconds": fitted - started, "predict_seconds": time.perf_counter() - fitted}
    memory = {"peak_bytes": peak_resident(), "bytes_before": before}
    sizes = {key: getattr(options, key) for key in ("cases", "length", "channels", "threads", "accelerator")}
    results.put(
        {"attention": attention, **sizes, **given, **memory, **seconds, "training_accuracy": accuracy}
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--attention", nargs="+", default=["primal", "softmax"])
    sizes = {"cases": 10_000, "length": 1000, "channels": 6, "epochs": 1, "members": 4, "patch-len": 0}
    for name, default in {**sizes, "threads": os.cpu_count()}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--out", type=Path, help="JSON file for the figures and the machine")
    options = parser.parse_args()
    rows = []
    for attention in options.attention:
        rows += in_processes(fit, 1, attention, options)
        print(rows[-1], flush=True)
    if options.out is not None:
        from kernel_attention_lab.benchmarking.machine import write_rows

        write_rows(options.out, rows)


if __name__ == "__main__":
    main()
