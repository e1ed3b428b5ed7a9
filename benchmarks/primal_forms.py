"""Training steps of primal attention's forms beside each other, in processor time.

    OMP_NUM_THREADS=1 python benchmarks/primal_forms.py --out results/benchmarks/primal-forms.json

First the nested objective against J^2, and primal_values against primal. Then causal layers with
data-dependent weights against those with data-independent ones, at each of ``--causal_lengths`` and batch 1.

A step is a forward in training mode, the auxiliary loss, and a backward. All layers take turns, step by step.
Processor time of one thread does not count what other processes do meanwhile, though they share the caches.
Printed are medians, and the medians of the ratios of neighbouring steps with their quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

import kernel_attention as ka
from kernel_attention.mechanisms import create_attention
from kernel_attention_lab.benchmarking.machine import write_rows

Ratio = tuple[str, str, float]  # of the first to the second; at most that was asked

RATIOS: tuple[Ratio, ...] = (
    ("nested", "penalty", 1.25),
    ("nested, data-independent", "penalty, data-independent", 1.25),
    ("values, nested", "penalty", 1.3),
    ("values, eta 0", "eta 0", 1.3),
)
CAUSAL: tuple[Ratio, ...] = (("causal", "causal, data-independent", 1.5),)


def layers(options: argparse.Namespace) -> dict[str, ka.AttentionLayer]:
    """The layers that are timed, in training mode."""
    sizes = options.embed_dim, options.num_heads
    primal = {"rank": options.rank, "max_len": options.length}
    made = {
        "eta 0": ("primal", primal),
        "penalty": ("primal", {**primal, "eta": 0.1}),
        "nested": ("primal", {**primal, "eta": 0.1, "objective_form": "nested"}),
        "penalty, data-independent": ("primal", {**primal, "eta": 0.1, "data_dependent": False}),
        "nested, data-independent": (
            "primal", {**primal, "eta": 0.1, "data_dependent": False, "objective_form": "nested"},
        ),
        "values, eta 0": ("primal_values", {"rank": options.rank}),
        "values, nested": ("primal_values", {"rank": options.rank, "eta": 0.1}),
    }  # fmt: skip
    return {name: create_attention(kind, *sizes, **given).train() for name, (kind, given) in made.items()}


def causal_layers(options: argparse.Namespace, length: int) -> dict[str, ka.AttentionLayer]:
    """The causal layers for one length, in training mode."""
    forms = {"causal": {"max_len": length}, "causal, data-independent": {"data_dependent": False}}
    sizes = options.embed_dim, options.causal_heads
    return {
        name: create_attention("primal", *sizes, rank=options.rank, **given).train()
        for name, given in forms.items()
    }


def step_of(
    layer: ka.AttentionLayer,
    x: torch.Tensor,
    *,
    is_causal: bool = False,
    autocast: bool = False,
) -> Callable[[], float]:
    """One training step, in seconds of the processor; with ``autocast`` the forward pass is in bfloat16."""
    forward_in = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()

    def step() -> float:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        start = time.process_time()
        with forward_in:
            loss = layer(x, is_causal=is_causal).square().mean() + ka.auxiliary_loss(layer)
        loss.backward()
        return time.process_time() - start

    return step


def compare(
    steps: Mapping[str, Callable[[], float]], ratios: Sequence[Ratio], rounds: int
) -> list[dict[str, Any]]:
    """Take turns, and print times and ratios; a row for each ratio."""
    for _ in range(3):
        for step in steps.values():
            step()
    times = [{name: step() for name, step in steps.items()} for _ in range(rounds)]
    medians = {name: statistics.median(each[name] for each in times) for name in steps}
    for name, seconds in medians.items():
        print(f"  {name}: {1e3 * seconds:.2f} ms")
    rows = []
    for name, other, bound in ratios:
        low, middle, high = statistics.quantiles([each[name] / each[other] for each in times])
        print(f"  {name} / {other}: {middle:.2f} [{low:.2f}, {high:.2f}] (at most {bound} asked)")
        row = {"form": name, "other": other, "seconds": medians[name], "other_seconds": medians[other]}
        rows.append(row | {"ratio_lower": low, "ratio_median": middle, "ratio_upper": high})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--embed_dim", type=int, default=64)
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--causal_lengths", type=int, nargs="*", default=[1024, 2048, 4096, 16384, 65536])
    parser.add_argument("--causal_heads", type=int, default=2)
    parser.add_argument("--causal_rounds", type=int, default=31)
    parser.add_argument("--out", type=Path, help="JSON file for the figures and the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.batch, options.length, options.embed_dim)
    print(f"batch {options.batch}, N {options.length}")
    steps = {name: step_of(layer, x) for name, layer in layers(options).items()}
    rows = [{"length": options.length, **row} for row in compare(steps, RATIOS, options.rounds)]
    for length in options.causal_lengths:
        x = torch.randn(1, length, options.embed_dim, requires_grad=True)
        steps = {n: step_of(layer, x, is_causal=True) for n, layer in causal_layers(options, length).items()}
        print(f"causal, batch 1, N {length}")
        rows += [{"length": length, **row} for row in compare(steps, CAUSAL, options.causal_rounds)]
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        write_rows(options.out, rows, settings=settings)


if __name__ == "__main__":
    main()
