"""How well primal_values models the kernel attention of its own feature map, while training and at rest.

    OMP_NUM_THREADS=1 python benchmarks/kernel_model.py

Trains the demo recipe (JapaneseVowels) with ``primal_values`` for every eta and seed, keeps copies of the
weights, and measures every copy on test sequences with ``kernel_attention.analysis.kernel_model_errors``:
the distance of E Lambda R^T from phi's kernel, the least that rank s allows, and that of the heads' outputs
from those of the exact kernel. Runs that are already in the folder are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch
from matplotlib.figure import Figure
from torch import nn

import kernel_attention as ka
from kernel_attention.analysis import kernel_model_errors
from kernel_attention.series import make_loader
from kernel_attention_lab.reporting.figures import PALETTE, legend_below, report_style
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.training.recipe_files import read_recipe
from kernel_attention_lab.training.run import train
from kernel_attention_lab.training.saved import load_run
from kernel_attention_lab.training.time_series_recipe import Recipe

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


def table(rows: list[dict]) -> list[str]:
    """A line for each eta and layer: the first and the last copy, means over the seeds."""
    lines = [
        "| η | layer | least error of rank s | error of the kernel | error of the outputs |",
        "|---|---|---|---|---|",
    ]
    for eta in dict.fromkeys(row["eta"] for row in rows):
        own = [row for row in rows if row["eta"] == eta]
        for layer in range(len(own[0]["course"][0]["kernel"])):
            ends = {
                key: [statistics.fmean(row["course"][at][key][layer] for row in own) for at in (0, -1)]
                for key in KEYS
            }
            shown = (
                " → ".join(f"{value:.3f}" for value in ends[key]) for key in ("least", "kernel", "output")
            )
            lines.append(f"| {eta:g} | {layer} | {' | '.join(shown)} |")
    return lines


def draw(rows: list[dict], path: Path) -> None:
    """A panel for the kernel and one for the outputs: means of layers and seeds over the training."""
    with report_style():
        figure = Figure(figsize=(7.4, 3.2))
        for axis, key in zip(figure.subplots(1, 2), ("kernel", "output"), strict=True):
            for color, eta in zip(PALETTE, dict.fromkeys(row["eta"] for row in rows), strict=False):
                own = [row for row in rows if row["eta"] == eta]

                def mean(part: str, own: list[dict] = own) -> list[float]:
                    copies = zip(*(row["course"] for row in own), strict=True)
                    return [statistics.fmean(value for one in copy for value in one[part]) for copy in copies]

                axis.plot(
                    own[0]["epochs"], mean(key), color=color, marker="o", markersize=3, label=f"η {eta:g}"
                )
                if key == "kernel":
                    label = f"η {eta:g}, least of its rank"
                    axis.plot(own[0]["epochs"], mean("least"), color=color, linestyle=":", label=label)
            axis.set(title=f"relative error of the {key}", xlabel="epoch", ylim=(0, None))
        legend_below(figure, figure.axes[0])
        figure.savefig(path, metadata={"Date": None})


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
    parser.add_argument("--figure", type=Path, default=Path("docs/figures/kernel-model.svg"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(options, eta, seed) for seed in options.seeds for eta in options.etas]
    for eta in options.etas:
        accuracies = [100 * row["accuracy"] for row in rows if row["eta"] == eta]
        print(f"η {eta:g}: accuracy {statistics.fmean(accuracies):.2f} %, seeds {options.seeds}")
    print("\n".join(table(rows)))
    settings = {"rank": options.rank, "epochs": options.epochs, "sequences": SEQUENCES}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    draw(rows, options.figure)


if __name__ == "__main__":
    main()
