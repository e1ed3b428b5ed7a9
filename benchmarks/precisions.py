"""Training steps in bfloat16, and under autocast to it, beside those in float32, in processor time.

    OMP_NUM_THREADS=1 python benchmarks/precisions.py --out results/benchmarks/precisions.json

In ``bfloat16`` weights and input have that precision. Under ``autocast`` both are in float32, and PyTorch
computes the products in bfloat16. The three take turns, step by step, on one thread. Printed are medians, and
the medians of the ratios of neighbouring steps with their quartiles.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from primal_forms import Ratio, compare, step_of

from kernel_attention.mechanisms import create_attention
from kernel_attention_lab.benchmarking.machine import write_rows

LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "linear": ("linear", {}),
    "primal": ("primal", {"rank": 20}),
    "primal, objective": ("primal", {"rank": 30, "eta": 0.1}),
    "multilinear, objective": ("multilinear", {"eta": 0.1}),
    "batch_norm": ("batch_norm", {}),
    "rpc": ("rpc", {"iterations": 4}),
}
RATIOS: tuple[Ratio, ...] = (("bfloat16", "float32", 1.0), ("autocast", "float32", 1.0))


def steps_of(name: str, embed_dim: int, options: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """The steps of one layer in every precision."""
    found = {}
    for precision in ("float32", "bfloat16", "autocast"):
        dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
        torch.manual_seed(0)
        kind, given = LAYERS[name]
        layer = create_attention(kind, embed_dim, options.num_heads, **given).to(dtype).train()
        x = torch.randn(options.batch, options.length, embed_dim).to(dtype).requires_grad_()
        found[precision] = step_of(layer, x, autocast=precision == "autocast")
    return found


def main() -> None:
    """Measure every layer at every width."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--embed_dim", type=int, nargs="*", default=[64, 256])
    parser.add_argument("--num_heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, help="JSON file for the figures and the machine")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in LAYERS:
        for embed_dim in options.embed_dim:
            print(f"{name}, d {embed_dim}")
            found = compare(steps_of(name, embed_dim, options), RATIOS, options.rounds)
            rows += [{"layer": name, "embed_dim": embed_dim, **row} for row in found]
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        write_rows(options.out, rows, settings=settings)


if __name__ == "__main__":
    main()
