"""What is around attention in a training step: dropout masks and optimizers, PyTorch's and ours in turns.

    OMP_NUM_THREADS=1 python benchmarks/around_attention.py --out results/benchmarks/around.json

Each model takes a step with the masks of ``kernel_attention.tensors.dropout`` and a step with PyTorch's. The
optimizers of the recipes take a step in one pass over all tensors, and one tensor after another. The order is
random in every round. Times are the thread's CPU times, which a busy machine hardly changes.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from kernel_attention.tensors import dropout
from kernel_attention.tensors.softmax import attention as fused_softmax
from kernel_attention.training.task import OPTIMIZERS
from kernel_attention_lab.benchmarking import Setting, find_contender, timing
from kernel_attention_lab.benchmarking.machine import write_rows

DEMO = {"primal": {"rank": 20, "eta": 0.1, "rank_multiplier": 5}}
SERIES = {"body": "series", "num_heads": 4, "batch_size": 16}
TOKENS = {"body": "tokens", "length": 1024}
LANGUAGE = {"body": "language", "embed_dim": 192, "num_heads": 4, "batch_size": 16, "is_causal": True}
CASES: dict[str, tuple[Any, Setting]] = {
    "series, primal, N 29 (demo)": (DEMO, Setting(length=29, **SERIES)),
    "series, primal, N 200": (DEMO, Setting(length=200, **SERIES)),
    "series, softmax, N 200": ("softmax", Setting(length=200, **SERIES)),
    "sequences, primal, N 1024": ("primal", Setting(**TOKENS)),
    "sequences, softmax, N 1024": ("softmax", Setting(**TOKENS)),
    "texts, softmax, N 64": ("softmax", Setting(length=64, **LANGUAGE)),
}
PYTORCHS = {"adamw": torch.optim.AdamW, "radam": torch.optim.RAdam}


@contextmanager
def pytorchs_masks() -> Iterator[None]:
    """Inside the block PyTorch draws the masks, and attention with dropout is PyTorch's."""
    with (
        mock.patch.object(dropout, "draws_masks", return_value=False),
        mock.patch.object(fused_softmax, "draws_masks", return_value=False),
    ):
        yield


def measure(spec: Any, setting: Setting, rounds: int) -> dict[str, list[float]]:
    """Seconds of every part in every round."""
    layer, x, cotangent = timing.layer_and_data(find_contender(spec).make, setting)
    layer.train()
    parameters = list(layer.parameters())

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        timing.step(layer, x, cotangent)

    def pytorchs_step() -> None:
        with pytorchs_masks():
            step()

    parts: dict[str, Callable[[], object]] = {"step, ours": step, "step, PyTorch's": pytorchs_step}
    for name, plain in PYTORCHS.items():
        parts[f"{name}, ours"] = OPTIMIZERS[name](parameters, lr=1e-6).step
        parts[f"{name}, PyTorch's"] = plain(parameters, lr=1e-6).step
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(rounds + 2):
        for name in random.sample(sorted(parts), len(parts)) if turn else parts:  # the gradients come first
            start = time.thread_time()
            parts[name]()
            if turn > 1:
                seconds[name].append(time.thread_time() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, help="JSON file for the figures and the machine")
    options = parser.parse_args()
    torch.manual_seed(0)
    random.seed(0)
    torch.set_num_threads(1)
    rows = []
    for name, (spec, setting) in CASES.items():
        seconds = measure(spec, setting, options.rounds)
        ratios = np.divide(seconds["step, ours"], seconds["step, PyTorch's"])
        lower, median, upper = map(float, np.quantile(ratios, [0.25, 0.5, 0.75]))
        row = {"model": name, "ratio_lower": lower, "ratio_median": median, "ratio_upper": upper}
        row |= {part: float(np.median(found)) for part, found in seconds.items()}
        rows.append(row)
        print(f"{name}: {median:.2f} ({lower:.2f} to {upper:.2f})", flush=True)
    if options.out:
        write_rows(options.out, rows, settings={"rounds": options.rounds})


if __name__ == "__main__":
    main()
