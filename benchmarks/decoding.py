"""Tokens per second and size of the state while decoding, over what was read before.

    OMP_NUM_THREADS=1 python benchmarks/decoding.py --out results/benchmarks/decoding.json

One layer, one thread, no gradients. Every contender reads a context of N tokens, and then decodes the same
few tokens after it again and again, going back to the state after N. Contenders take turns within a round; a
cell is the median over the rounds. The time is the thread's CPU time, which a busy machine hardly changes.
The state's bytes are per sequence, right after the context: growing buffers hold up to twice as much.

"softmax, whole prefix" has no state: it attends to all N tokens again for every new one.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch

import kernel_attention as ka
from kernel_attention.functional import state_bytes
from kernel_attention_lab.benchmarking.machine import write_rows

WITHOUT_STATE = "softmax, whole prefix"
OPTIONS = {
    "primal": {"primal": {}, "primal, independent": {"data_dependent": False}},
    "multilinear": {"multilinear": {}, "multilinear, data-dependent": {"variant": "data_dependent"}},
}


def contenders(width: int, heads: int, longest: int) -> dict[str, Any]:
    """Every mechanism that decodes, in its default form, by the name of its line."""
    layers = {}
    for mechanism in ka.list_attention():
        if mechanism.decoding == "no":
            continue
        shared = {"max_len": longest} if "max_len" in mechanism.options else {}
        for line, options in OPTIONS.get(mechanism.name, {mechanism.name: {}}).items():
            layers[line] = ka.create_attention(mechanism.name, width, heads, **shared, **options).eval()
    return layers


def seconds_per_step(layer: Any, state: Any, tokens: torch.Tensor) -> float:
    start = time.thread_time()
    for token in tokens:
        _, state = layer.step(token, state)
    return (time.thread_time() - start) / len(tokens)


def seconds_of_prefix(layer: Any, x: torch.Tensor) -> float:
    start = time.thread_time()
    layer(x, is_causal=True)
    return time.thread_time() - start


@torch.no_grad()
def measure(length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    width, batch = options.embed_dim, options.batch_size
    layers = contenders(width, options.num_heads, length + options.steps)
    x = torch.randn(batch, length, width)
    tokens = torch.randn(options.steps, batch, width)
    states = {name: layer.prefill(x)[1] for name, layer in layers.items()}
    held = {name: state_bytes(state) for name, state in states.items()}
    for name, layer in layers.items():
        _, grown = layer.step(tokens[0], states[name])  # warm-up, and the buffers' next size
        states[name] = grown
    rounds: list[dict[str, float]] = []
    for _ in range(options.rounds):
        times = {name: seconds_per_step(layer, states[name], tokens[1:]) for name, layer in layers.items()}
        if len(rounds) < options.prefix_rounds:
            times[WITHOUT_STATE] = seconds_of_prefix(layers["softmax"], x)
        rounds.append(times)
    rows = []
    for name in [*layers, WITHOUT_STATE]:
        median = statistics.median(times[name] for times in rounds if name in times)
        rows.append(
            {
                "attention": name,
                "length": length,
                "tokens_per_second": batch / median,
                "state_bytes": held.get(name, 0) // batch,
            }
        )
    return rows


def show(rows: list[dict[str, Any]], lengths: list[int]) -> None:
    """Tokens per second of all lengths, then bytes, a line for each contender."""
    cells = {(row["attention"], row["length"]): row for row in rows}
    print(f"{'attention':30}" + "".join(f"{f'tok/s {n}':>13}" for n in lengths), end="")
    print("".join(f"{f'bytes {n}':>13}" for n in lengths))
    for name in dict.fromkeys(row["attention"] for row in rows):
        found = [cells[name, n] for n in lengths]
        print(f"{name:30}" + "".join(f"{row['tokens_per_second']:13.0f}" for row in found), end="")
        print("".join(f"{row['state_bytes']:13}" for row in found))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192])
    defaults = {
        "rounds": 15,
        "prefix-rounds": 3,
        "steps": 17,
        "batch-size": 1,
        "embed-dim": 512,
        "num-heads": 8,
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, help="JSON file for the figures, the settings and the machine")
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rows = [row for length in options.lengths for row in measure(length, options)]
    show(rows, options.lengths)
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        write_rows(options.out, rows, settings=settings)


if __name__ == "__main__":
    main()
