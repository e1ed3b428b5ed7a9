"""Which form of a layer is faster, eagerly and under torch.compile: the formulas, or a hand-written pass?

    python benchmarks/compiled_forms.py --length 64 256 1024 4096 --rounds 15 --threads 1
    python benchmarks/performance.py compiled-forms compiled-forms-wide  # tables of docs/performance.md
    python benchmarks/compiled_forms.py --device cuda --layers primal --forms reference fused

Every round times each of them once, in a random order. It prints medians and quartiles of the ratios to
the eager formulas of the same round. The thresholds in the layers' ``plan`` were measured here.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention_lab.benchmarking.machine import write_rows

LAYERS = {
    "primal, objective": ("primal", {"rank": 30, "eta": 0.1}),
    "primal": ("primal", {"rank": 20}),
    "primal, data-independent": ("primal", {"rank": 20, "data_dependent": False}),
    "multilinear": ("multilinear", {}),
    "multilinear, objective": ("multilinear", {"eta": 0.1}),
}


class Step(nn.Module):
    """A layer's output and its term of the loss, so that both are compiled."""

    def __init__(self, layer: ka.AttentionLayer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """(B, N, d) -> (B, N, d), and the penalty in training."""
        y = self.layer(x)
        return y, self.layer.penalty() if self.training else None


def seconds(step: nn.Module, x: Tensor, cotangent: Tensor, training: bool) -> float:
    """Seconds of a training step, or of a forward pass in inference."""
    step.train(training)
    step.zero_grad(set_to_none=True)
    x.grad = None
    wait = torch.cuda.synchronize if x.is_cuda else (lambda: None)
    wait()
    start = time.perf_counter()
    with torch.set_grad_enabled(training):
        y, own = step(x)
        if training and own is not None and own.requires_grad:
            torch.autograd.backward([y, own], [cotangent, None])
        elif training:
            y.backward(cotangent)
    wait()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--length", nargs="+", type=int, default=[64, 256, 1024, 4096])
    parser.add_argument("--embed_dim", nargs="+", type=int, default=[64])
    parser.add_argument("--num_heads", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--forms", nargs="+", default=["reference", "fused"])
    parser.add_argument("--eager", action="store_true", help="leave out torch.compile")
    parser.add_argument("--out", type=Path, help="JSON file for the ratios and the machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows = []
    for name in options.layers:
        for width in options.embed_dim:
            for length in options.length:
                rows += measure(name, width, length, options)
    if options.out:
        settings = {key: value for key, value in vars(options).items() if key != "out"}
        write_rows(options.out, rows, options.device, settings=settings)


def measure(name: str, width: int, length: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One layer at one size: a printed line for every pass, and a row for every form in it."""
    rows = []
    mechanism, arguments = LAYERS[name]
    contenders = {}
    for form in options.forms:
        for how in ("eager",) if options.eager else ("eager", "compiled"):
            torch.manual_seed(0)
            layer = ka.create_attention(
                mechanism, embed_dim=width, num_heads=options.num_heads, **arguments, impl=form
            )
            step = Step(layer).to(options.device)
            contenders[how, form] = torch.compile(step, fullgraph=True) if how == "compiled" else step
    x = torch.randn(options.batch_size, length, width, device=options.device, requires_grad=True)
    cotangent = torch.randn_like(x)
    for training in (False, True):
        kind = "step" if training else "forward"
        for step in contenders.values():
            for _ in range(3):
                seconds(step, x, cotangent, training)
        times: dict[tuple[str, str], list[float]] = {key: [] for key in contenders}
        for _ in range(options.rounds):
            for key in random.sample(list(contenders), len(contenders)):
                passes = [seconds(contenders[key], x, cotangent, training) for _ in range(3)]
                times[key].append(statistics.median(passes))
        base = times["eager", "reference"]
        figures = [f"eager reference {1e3 * statistics.median(base):.2f} ms"]
        for (how, form), own in times.items():
            if (how, form) != ("eager", "reference"):
                ratios = [mine / theirs for mine, theirs in zip(own, base, strict=True)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                figures.append(f"{how} {form} {middle:.2f} ({low:.2f} to {high:.2f})")
                row = {"layer": name, "embed_dim": width, "length": length, "pass": kind}
                row |= {"how": how, "form": form}
                rows.append(row | {"ratio_lower": low, "ratio_median": middle, "ratio_upper": high})
        print(f"{name}, d {width}, N {length}, {kind}: " + "; ".join(figures), flush=True)
    torch.compiler.reset()
    return rows


if __name__ == "__main__":
    main()
