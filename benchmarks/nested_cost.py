"""Training steps: the nested objective against J^2, and primal_values against primal.

    OMP_NUM_THREADS=1 python benchmarks/nested_cost.py

A step is a forward in training mode, the auxiliary loss, and a backward. All layers take turns, step by step,
so that whatever else the machine does falls on all of them alike. Printed are medians, and the medians of the
ratios of neighbouring steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

import kernel_attention as ka
from kernel_attention.mechanisms import create_attention

RATIOS = (
    ("nested", "penalty", 1.25),
    ("nested, data-independent", "penalty, data-independent", 1.25),
    ("values, nested", "penalty", 1.3),
    ("values, eta 0", "eta 0", 1.3),
)


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


def step_of(layer: ka.AttentionLayer, x: torch.Tensor) -> Callable[[], float]:
    """One training step, in seconds."""

    def step() -> float:
        layer.zero_grad(set_to_none=True)
        start = time.perf_counter()
        (layer(x).square().mean() + ka.auxiliary_loss(layer)).backward()
        return time.perf_counter() - start

    return step


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
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x = torch.randn(options.batch, options.length, options.embed_dim)
    steps = {name: step_of(layer, x) for name, layer in layers(options).items()}
    for _ in range(3):
        for step in steps.values():
            step()
    rounds = [{name: step() for name, step in steps.items()} for _ in range(options.rounds)]
    for name in steps:
        print(f"{name}: {1e3 * statistics.median(each[name] for each in rounds):.2f} ms")
    for name, other, bound in RATIOS:
        ratio = statistics.median(each[name] / each[other] for each in rounds)
        print(f"{name} / {other}: {ratio:.2f} (at most {bound} asked)")


if __name__ == "__main__":
    main()
