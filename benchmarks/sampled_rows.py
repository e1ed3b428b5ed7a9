"""What a uniform sample of a sequence's rows keeps of its main patterns, in layers of Primal-Attention.

    OMP_NUM_THREADS=1 python benchmarks/sampled_rows.py --data_root DATA --out FILE.json

Trains the demo's PrimalFormer (s = 20 directions) on sets of longer sequences, and takes the input X (N, d)
of every layer on test sequences. The patterns are the leading right singular directions of X. The rows of a
random sample of n, without replacement, have leading directions too: *kept* is the energy of X in these, over
the most that as many directions can hold. The paper samples n = 5 s and n = 10 s rows. Runs that are already
in the folder are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from singular_directions import layer_inputs
from torch import Tensor

from kernel_attention.files import write_text_atomically
from kernel_attention_lab.benchmarking.machine import describe_machine
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.runs.saved import SavedRun, load_run
from kernel_attention_lab.tasks.time_series import Recipe

RANK, DRAWS = 20, 16
SAMPLES, PATTERNS = (1, 2, 5, 10), (4, RANK)  # n over s, and how many directions


def trained(options: argparse.Namespace, dataset: str, seed: int) -> SavedRun:
    """A finished run; trains where there is none."""
    folder = options.runs / f"{dataset}-{seed}"
    if not (folder / "summary.json").exists():
        _, values = read_recipe("demo")
        recipe = Recipe(**values | {"dataset": dataset, "seeds": [seed], "threads": 1})
        train(recipe, folder, name="demo", data_root=options.data_root, progress=False)
    return load_run(folder)


def kept(x: Tensor, rows: int, patterns: int, generator: torch.Generator) -> float:
    """Energy of x (N, d) in the leading directions of a sample of its rows, over the best such energy."""
    sample = x[torch.randperm(len(x), generator=generator)[:rows]]
    directions = torch.linalg.svd(sample, full_matrices=False)[2][:patterns]
    best = torch.linalg.svdvals(x)[:patterns].square().sum()
    return float((x @ directions.mT).square().sum() / best)


@torch.no_grad()
def examine(run: SavedRun, seed: int, options: argparse.Namespace) -> dict[tuple[int, int], list[float]]:
    """The shares by n / s and number of patterns, over sequences, layers and draws."""
    generator = torch.Generator().manual_seed(seed)
    found = defaultdict(list)
    for _, x, _ in layer_inputs(run.model(seed).double(), run.test_split(options.data_root)):
        for times in SAMPLES:
            if times * RANK < x.size(1):  # else the sample is the sequence
                for patterns in PATTERNS:
                    shares = [kept(x[0], times * RANK, patterns, generator) for _ in range(DRAWS)]
                    found[times, patterns] += shares
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--datasets", nargs="+", default=["Handwriting", "UWaveGestureLibrary"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data_root", default=None)
    parser.add_argument("--runs", type=Path, default=Path("runs/sampled-rows"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    cells = []
    for dataset in options.datasets:
        shares: dict[tuple[int, int], list[float]] = defaultdict(list)
        for seed in options.seeds:
            for key, found in examine(trained(options, dataset, seed), seed, options).items():
                shares[key] += found
        for patterns in PATTERNS:
            rows = []
            for times in SAMPLES:
                if values := shares.get((times, patterns)):
                    lower, upper = np.quantile(values, [0.25, 0.75]).tolist()
                    rows.append({"contender": f"n = {times} s", "kept": statistics.median(values),
                                 "lower": lower, "upper": upper, "least": min(values)})  # fmt: skip
            cells.append({"setting": {"dataset": dataset, "patterns": patterns}, "rows": rows})
            print(cells[-1], flush=True)
    if options.out:
        settings = {"rank": RANK, "draws": DRAWS, "seeds": options.seeds}
        record = {"machine": describe_machine({"cpu"}), "settings": settings, "cells": cells}
        write_text_atomically(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
