"""How well primal_values models the kernel attention of its own feature map, while training and at rest.

    OMP_NUM_THREADS=1 python benchmarks/kernel_model.py

Trains the demo recipe (JapaneseVowels) with ``primal_values`` for every eta and seed, keeps copies of the
weights, and measures every copy on test sequences with ``kernel_attention.analysis.kernel_model_errors``:
the distance of E Lambda R^T from phi's kernel, the least that rank s allows, and that of the heads' outputs
from those of the exact kernel. Runs that are already in the folder are read, not repeated.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

import torch
from torch import nn

import kernel_attention as ka
from kernel_attention.analysis import kernel_model_errors
from kernel_attention.series import make_loader
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks.time_series import Recipe

SEQUENCES = 24
KEYS = ("kernel", "least", "output")


def run_folder(options: argparse.Namespace, eta: float, seed: int) -> Path:
    """The folder of a finished run; trains where there is none."""
    folder = options.runs / f"rank-{options.rank}_eta-{eta:g}_epochs-{options.epochs}_seed-{seed}"
    if not (folder / "summary.json").exists():
        _, values = read_recipe("demo")
        attention = {"primal_values": {"rank": options.rank, "eta": eta}}
        given = {"attention": attention, "epochs": options.epochs, "seeds": [seed], "threads": 1,
                 "keep_weights_every": max(options.epochs // 6, 1)}  # fmt: skip
        train(Recipe(**{**values, **given}), folder, name="demo", progress=False)
    return folder


@torch.no_grad()
def errors(model: nn.Module, split: object) -> dict[str, list[float]]:
    """The mean errors over the test sequences, a number for each layer."""
    layers = [module for module in model.modules() if isinstance(module, ka.PrimalValueAttention)]
    seen: dict[nn.Module, torch.Tensor] = {}
    for layer in layers:
        layer.register_forward_pre_hook(lambda module, args: seen.__setitem__(module, args[0]))
    batch = next(iter(make_loader(split.sequences[:SEQUENCES], SEQUENCES)))
    model(batch.x.double(), batch.attention_mask)
    found = [kernel_model_errors(layer, seen[layer], attention_mask=batch.attention_mask) for layer in layers]
    return {key: [getattr(each, key).mean().item() for each in found] for key in KEYS}


def measure(options: argparse.Namespace, eta: float, seed: int) -> dict:
    """The errors of every kept copy of a run's weights, and its test accuracy."""
    folder = run_folder(options, eta, seed)
    run = load_run(folder)
    split, epochs = run.test_split(), run.kept_epochs(seed)
    course = [errors(run.model(seed, epoch).double(), split) for epoch in epochs]
    accuracy = read_json(folder / f"seed-{seed}" / "evaluation.json")["accuracy"]
    return {"eta": eta, "seed": seed, "accuracy": accuracy, "epochs": epochs, "course": course}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--etas", type=float, nargs="+", default=[0.0, 0.1, 1.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--runs", type=Path, default=Path("runs/kernel-model"))
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/kernel_model.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(options, eta, seed) for seed in options.seeds for eta in options.etas]
    for eta in options.etas:
        accuracies = [100 * row["accuracy"] for row in rows if row["eta"] == eta]
        print(f"η {eta:g}: accuracy {statistics.fmean(accuracies):.2f} %, seeds {options.seeds}")
    settings = {"rank": options.rank, "epochs": options.epochs, "sequences": SEQUENCES}
    write_rows(options.out, rows, settings=settings)


if __name__ == "__main__":
    main()
