"""Time and memory of one attention layer over the sequence length, beside canonical softmax attention.

    python benchmarks/run.py --lengths 1024 2048 4096 --out benchmarks/results/cpu.json

Contenders take turns within a round, so that a slow minute of the machine falls on all of them. A cell is
the median over the rounds, the ratio the median of each round's ratio to `softmax`; forward and backward in
training mode. Memory is what the backward pass keeps: storages saved by autograd, parameters left out
(it is counted, and the same every time).
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

# The table of contenders: a line's name and what makes its layer from (embed_dim, num_heads, max_len).
CONTENDERS = {
    "softmax": lambda d, h, n: ka.create_attention("softmax", d, h),
    "symmetric": lambda d, h, n: ka.create_attention("symmetric", d, h),
    "cosine": lambda d, h, n: ka.create_attention("cosine", d, h),
    "primal s=20": lambda d, h, n: ka.PrimalAttention(d, h, rank=20, max_len=n),
    "primal s=30, objective": lambda d, h, n: ka.PrimalAttention(d, h, rank=30, eta=0.1, max_len=n),
    "primal s=20, independent": lambda d, h, n: ka.PrimalAttention(d, h, rank=20, data_dependent=False),
}
BASELINE = "softmax"


def step(layer: torch.nn.Module, x: torch.Tensor) -> None:
    layer.zero_grad(set_to_none=True)
    x.grad = None
    (layer(x).square().mean() + ka.auxiliary_loss(layer)).backward()


def seconds(layer: torch.nn.Module, x: torch.Tensor) -> float:
    wait = torch.cuda.synchronize if x.is_cuda else lambda: None
    wait()
    start = time.perf_counter()
    step(layer, x)
    wait()
    return time.perf_counter() - start


def saved_megabytes(layer: torch.nn.Module, x: torch.Tensor) -> float:
    own = {parameter.untyped_storage().data_ptr() for parameter in layer.parameters()}
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = layer(x).square().mean() + ka.auxiliary_loss(layer)
    del loss  # alive until here: no storage may be freed and counted again at the same address
    return sum(saved.values()) / 1e6


def measure(length: int, options: argparse.Namespace) -> list[dict]:
    width, heads, device = options.embed_dim, options.num_heads, options.device
    x = torch.randn(options.batch_size, length, width, device=device, requires_grad=True)
    layers = {name: make(width, heads, length).to(device).train() for name, make in CONTENDERS.items()}
    memory = {name: saved_megabytes(layer, x) for name, layer in layers.items()}
    for layer in layers.values():
        step(layer, x)  # warm-up
    rounds = [{name: seconds(layer, x) for name, layer in layers.items()} for _ in range(options.rounds)]
    return [
        {
            "attention": name,
            "length": length,
            "milliseconds": 1e3 * statistics.median(times[name] for times in rounds),
            "time_ratio": statistics.median(times[name] / times[BASELINE] for times in rounds),
            "saved_megabytes": memory[name],
        }
        for name in layers
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    defaults = {
        "rounds": 7,
        "batch-size": 4,
        "embed-dim": 64,
        "num-heads": 2,
        "threads": torch.get_num_threads(),
    }
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cpu")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the figures and the settings they were made with"
    )
    return parser.parse_args()


def main() -> None:
    options = parse()
    torch.manual_seed(0)
    torch.set_num_threads(options.threads)
    print(f"{'length':>7}  {'attention':26}{'ms':>10}{'x softmax':>11}{'saved MB':>10}")
    rows = []
    for length in options.lengths:
        for row in measure(length, options):
            rows.append(row)
            figures = f"{row['milliseconds']:10.2f}{row['time_ratio']:11.2f}{row['saved_megabytes']:10.1f}"
            print(f"{length:7}  {row['attention']:26}{figures}", flush=True)
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        versions = {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "machine": platform.platform(),
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(
            json.dumps({"settings": settings, "versions": versions, "rows": rows}, indent=2)
        )


if __name__ == "__main__":
    main()
