"""How near attention comes to the minimum that it stands for in Principal Attention Pursuit.

    OMP_NUM_THREADS=1 python benchmarks/pursuit_steps.py RUN RUN --data_root DATA --out FILE.json

Principal Component Pursuit minimises ||L||_* + lambda ||S||_1 over L + S = K. With S and Y fixed, its
Lagrangian is, but for a constant,

    f(L) = ||L||_* + mu / 2 ||L - M||^2,    M = K - S + Y / mu,

which is least at D_{1/mu}(M), the thresholded singular values. The kernel-PCA paper puts an attention of
T = K - S - Y / mu in its place. *left* is f(L) after that step, over f(L) before it, both less the least f:
0 at the minimum, 1 for a step that gains nothing, more than 1 for one that leads away. mu is definition 1's.

The data are planted ones, a matrix of low rank and gross errors in a few entries, with the cleaned keys
as values, at three sizes; and the first layers of the trained classifiers of the suite kernel_pca_iterations,
with their own values, on test sentences. "plus" is the pursuit with T = M, the sign that the problem has.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import kernel_attention as ka
from kernel_attention.files import write_text_atomically
from kernel_attention.functional import pursuit_threshold, softmax_attention
from kernel_attention.tensors.statistics import shrink
from kernel_attention_lab.benchmarking.machine import describe_machine
from kernel_attention_lab.runs.saved import load_run

SIGNS = {"printed": -1.0, "plus": 1.0}
STEPS, LAM, SENTENCES = 4, 4.0, 64
TOKENS, WIDTH, RANK, GROSS, MATRICES = 64, 32, 3, 0.05, 32
SIZES = (0.3, 1.0, 3.0)


def objective(low_rank: Tensor, target: Tensor, mu: Tensor) -> Tensor:
    """f(L) of (..., N, p), (...)."""
    nuclear = torch.linalg.matrix_norm(low_rank, ord="nuc")
    return nuclear + mu / 2 * (low_rank - target).square().sum((-2, -1))


def thresholded(x: Tensor, threshold: Tensor) -> Tensor:
    """D_t(x): every singular value less t, at least 0."""
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    return (left * (values - threshold[..., None]).clamp_min(0).unsqueeze(-2)) @ right


def what_is_left(keys: Tensor, values: Tensor | None, threshold: Tensor, sign: float) -> Iterator[Tensor]:
    """The share of the way to the minimum that is left, for every step; (B, h) of keys (B, h, N, p)."""
    mu = 1 / (4 * keys.abs().mean((-2, -1)))
    low_rank = dual = torch.zeros_like(keys)  # the dual variable over mu
    for _ in range(STEPS):
        sparse = shrink(keys - low_rank + dual, threshold)
        target, cleaned = keys - sparse + dual, keys - sparse + sign * dual
        least = objective(thresholded(target, 1 / mu), target, mu)
        before = objective(low_rank, target, mu)
        low_rank = softmax_attention(cleaned, cleaned, cleaned if values is None else values)
        yield (objective(low_rank, target, mu) - least) / (before - least)
        dual = dual + keys - low_rank - sparse


def planted(size: float) -> Tensor:
    """Matrices of low rank with gross errors, (B, 1, N, p)."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(MATRICES, 1, *shape, generator=generator, dtype=torch.float64)

    low_rank = normal(TOKENS, RANK) @ normal(RANK, WIDTH) / math.sqrt(RANK)
    errors = 10 * normal(TOKENS, WIDTH)
    hit = torch.rand(errors.shape, generator=generator) < GROSS
    return size * torch.where(hit, low_rank + errors, low_rank)


@torch.no_grad()
def heads(folder: Path, data_root: str | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Keys, values and thresholds of the first layer on sentences, (1, h, N, p), without padding."""
    run = load_run(folder)
    model = run.model().double()
    (layer, *_) = [each for each in model.modules() if isinstance(each, ka.RobustPrincipalAttention)]
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda module, given: seen.append(given[0]))
    for tokens, mask in run.experiment(data_root).batches(SENTENCES):
        model(tokens, mask)
        for x, length in zip(seen.pop(), mask.sum(1).tolist(), strict=True):
            keys, values = (
                layer.split_heads(proj(x[None, :length])) for proj in (layer.k_proj, layer.v_proj)
            )
            yield keys, values, pursuit_threshold(keys, layer.lam, convention=layer.convention)
    handle.remove()


def row(contender: str, left: list[Tensor]) -> dict[str, Any]:
    """Median and quartiles of the first step and of all of them; ``left`` is (steps, any) of each example."""
    steps = torch.cat([each.flatten(1) for each in left], dim=1).numpy()
    found: dict[str, Any] = {"contender": contender}
    for name, values in (("first", steps[0]), ("steps", steps)):
        lower, median, upper = np.quantile(values, [0.25, 0.5, 0.75]).tolist()
        found[name] = {"median": median, "lower": lower, "upper": upper, "away": float((values > 1).mean())}
    return found


def cell(setting: dict[str, Any], examples: list[tuple[Tensor, Tensor | None, Tensor]]) -> dict[str, Any]:
    """The rows of one kind of data."""
    rows = [
        row(name, [torch.stack(list(what_is_left(*each, sign))) for each in examples])
        for name, sign in SIGNS.items()
    ]
    found = {"setting": setting, "rows": rows}
    print(json.dumps(found), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="*", type=Path, help="run folders of the row iterations_4")
    parser.add_argument("--data_root", default=None)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    by_size: dict[float, list[tuple[Tensor, Tensor | None, Tensor]]] = {
        size: [(keys, None, pursuit_threshold(keys, LAM, convention="paper"))]
        for size in SIZES
        for keys in [planted(size)]
    }
    cells = [cell({"data": "planted", "size": size}, each) for size, each in by_size.items()]
    cells.append(
        cell({"data": "planted", "size": "all"}, [each for some in by_size.values() for each in some])
    )
    if options.runs:
        trained = [each for folder in options.runs for each in heads(folder, options.data_root)]
        cells.append(cell({"data": "SST-2", "runs": len(options.runs)}, list(trained)))
    if options.out:
        settings = {"steps": STEPS, "lam": LAM, "matrices": MATRICES, "sentences": SENTENCES}
        record = {"machine": describe_machine({"cpu"}), "settings": settings, "cells": cells}
        write_text_atomically(options.out, json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
