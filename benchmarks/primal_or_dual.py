"""The primal and the dual of the kernel SVD and of its multilinear form, over N points and M features.

    OMP_NUM_THREADS=1 python benchmarks/primal_or_dual.py --out results/benchmarks/primal_or_dual.json

Both are given the same explicit features, float32, and asked for the same directions. The primal side never
forms the kernel; the dual side forms it, which is counted, and decomposes it. Both compute the scores and J
too. Order 2 is the kernel SVD of
N x N, order 3 the multilinear SVD of N x N x N. Every round times both, in a new order, in seconds of the
processor, which other work on the machine lengthens less than those of the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kernel_attention.files import write_text_atomically
from kernel_attention.solvers import (
    kernel_multilinear_svd,
    kernel_svd,
    kmlsvd_dual_objective,
    kmlsvd_dual_scores,
    multilinear_svd,
    primal_kernel_svd,
)
from kernel_attention.tensors.multilinear.kernel_tensors import multilinear_kernel
from kernel_attention_lab.benchmarking.machine import describe_machine, load

SIZES = {2: ((64, 1024), (256, 256), (1024, 64)), 3: ((8, 128), (32, 32), (128, 8))}
COMPONENTS = {2: 8, 3: 4}
LEAST = 0.02  # seconds of the calls that are timed together
FIT = 1e-3  # largest relative difference of the singular values of both sides


def matrix_contenders(features: list[Tensor], components: int) -> dict[str, Callable[[], Tensor]]:
    """Singular values of Phi_1 Phi_2^T from either side."""
    first, second = features
    return {
        "primal": lambda: primal_kernel_svd(first, second, components).values,
        "dual": lambda: kernel_svd(first @ second.mT, None, components, kernel="precomputed").values,
    }


def tensor_contenders(features: list[Tensor], components: int) -> dict[str, Callable[[], Tensor]]:
    """The leading mode-1 singular values from either side."""

    def dual() -> Tensor:
        kernel = multilinear_kernel([phi[None, None] for phi in features])[0, 0]
        found = multilinear_svd(kernel, components)
        kmlsvd_dual_scores(kernel, found.factors, found.core)
        kmlsvd_dual_objective(kernel, found.factors, found.core)
        return found.singular_values[0][:components]

    return {
        "primal": lambda: kernel_multilinear_svd(features, components).svd.singular_values[0][:components],
        "dual": dual,
    }


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A cell of the record for every order and size."""
    for order, sizes in SIZES.items():
        for points, width in sizes:
            generator = torch.Generator().manual_seed(0)
            features = [torch.randn(points, width, generator=generator) / width**0.5 for _ in range(order)]
            make = matrix_contenders if order == 2 else tensor_contenders
            contenders = make(features, COMPONENTS[order])
            values = {name: solve() for name, solve in contenders.items()}  # warms up too
            difference = float(((values["primal"] / values["dual"]) - 1).abs().max())
            if difference > FIT:
                raise SystemExit(
                    f"order {order}, N {points}, M {width}: the sides differ by {difference:.1e}"
                )
            setting = {"order": order, "points": points, "features": width, "components": COMPONENTS[order]}
            yield {"setting": setting, "difference": difference, "rows": timed(contenders, options.rounds)}


def seconds_of(solve: Callable[[], Tensor], calls: int) -> float:
    """Processor seconds of a call, the mean of so many."""
    start = time.process_time()
    for _ in range(calls):
        solve()
    return (time.process_time() - start) / calls


def timed(contenders: dict[str, Callable[[], Tensor]], rounds: int) -> list[dict[str, Any]]:
    """Seconds of every contender, and over the other's of the same round: medians and quartiles."""
    shuffle = random.Random(0).shuffle
    calls = {name: math.ceil(LEAST / seconds_of(solve, 3)) for name, solve in contenders.items()}
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        order = list(contenders)
        shuffle(order)
        for name in order:
            seconds[name].append(seconds_of(contenders[name], calls[name]))
    rows = []
    for name, other in (("primal", "dual"), ("dual", "primal")):
        ratios = [own / theirs for own, theirs in zip(seconds[name], seconds[other], strict=True)]
        lower, median, upper = np.quantile(ratios, [0.25, 0.5, 0.75]).tolist()
        rows.append(
            {"contender": name, "seconds": statistics.median(seconds[name]), "ratio": median,
             "ratio_lower": lower, "ratio_upper": upper}
        )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    before, found = load(), []
    for cell in cells(options):
        found.append(cell)
        print(cell, flush=True)
    if options.out:
        machine = {**describe_machine({"cpu"}), "load_before": before, "load_after": load()}
        record = {"machine": machine, "settings": {"rounds": options.rounds, "threads": 1}, "cells": found}
        write_text_atomically(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
