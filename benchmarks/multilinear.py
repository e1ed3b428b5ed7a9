"""A training step of multilinear attention beside canonical attention, at the sizes of the KMLSVD thesis.

    OMP_NUM_THREADS=1 python benchmarks/multilinear.py --out benchmarks/results/multilinear.json

Forward, objective and backward of one layer (d 20, 4 heads, batch 16; the rank as in the thesis's tables), in
CPU time of one thread, which a busy machine hardly changes. Contenders take turns within a round; a ratio is
the median over the rounds of softmax's time over the contender's in the same round.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

import kernel_attention as ka

# The thesis's own layer took about twice canonical attention's time; its ranks are those of table 4-2.
CONTENDERS = {
    "standard": {"rank": 5},
    "learnable_diagonal": {"rank": 5, "variant": "learnable_diagonal"},
    "learnable": {"rank": 3, "variant": "learnable"},
    "learnable, mlsvd": {"rank": 3, "variant": "learnable", "core": "mlsvd"},
    "learnable_diagonal, cost": {"rank": 5, "variant": "learnable_diagonal", "core": "cost", "eta_core": 0.1},
    "data_dependent": {"rank": 5, "variant": "data_dependent"},
}


def seconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    start = time.thread_time()  # a CPU backward runs in the calling thread too
    (layer(x).square().mean() + ka.auxiliary_loss(layer)).backward()
    return time.thread_time() - start


def measure(length: int, options: argparse.Namespace) -> dict:
    width, heads = options.embed_dim, options.num_heads
    x = torch.randn(options.batch_size, length, width, requires_grad=True)
    layers = {"softmax": ka.create_attention("softmax", width, heads)}
    for name, chosen in CONTENDERS.items():
        layers[name] = ka.MultilinearAttention(width, heads, eta=0.1, max_len=length, **chosen)
    for layer in layers.values():
        seconds(layer, x)  # warm-up
    rounds = [{name: seconds(layer, x) for name, layer in layers.items()} for _ in range(options.rounds)]
    return {
        "length": length,
        "milliseconds": {name: 1e3 * statistics.median(r[name] for r in rounds) for name in layers},
        "ratio": {name: statistics.median(r["softmax"] / r[name] for r in rounds) for name in CONTENDERS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="+", default=[29, 144, 300, 405, 1152])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--embed-dim", type=int, default=20)
    parser.add_argument("--num-heads", type=int, default=4)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = []
    for length in options.lengths:
        rows.append(measure(length, options))
        shown = "  ".join(f"{name} {ratio:.2f}x" for name, ratio in rows[-1]["ratio"].items())
        print(f"N {length:5}  softmax {rows[-1]['milliseconds']['softmax']:.1f} ms  {shown}", flush=True)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "platform": platform.platform(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
        }
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        options.out.write_text(
            json.dumps({"machine": machine, "settings": settings, "rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
