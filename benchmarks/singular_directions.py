"""How near the layers that Primal-Attention trains come to the singular directions of their own kernels.

    python benchmarks/singular_directions.py --figure docs/figures/singular-directions.png
    python benchmarks/singular_directions.py --form nested --out benchmarks/results/nested-directions.json

Trains the demo recipe (JapaneseVowels) for every rank, eta and seed, through the training code of the
command line, and takes each trained network's layers apart on test sequences. At the kernel SVD of its own
kernel K, a layer's scores are E = H_e Sigma and R = H_r Sigma (remark 3.3). So the leading k left singular
vectors of E are compared with those of K, by their principal angles, and R with the right ones; beside

* the same network before training (orthogonal initial weights, its own initial kernels),
* the trained network with W_e and W_r drawn anew as at first: what E = phi f(X)^T W gives for free,
* the trained network with W_e and W_r fitted to these sequences by the nested objective: the floor, since
  one W serves them all,
* k-dimensional subspaces drawn at random in R^n.

Runs that are already in the folder are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.functional import KernelGrams, kernel_grams, nested_objective
from kernel_attention.series import make_loader
from kernel_attention_lab.reporting.figures import PALETTE, report_style
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.training.recipe_files import read_recipe
from kernel_attention_lab.training.run import build_model, train
from kernel_attention_lab.training.saved import load_run
from kernel_attention_lab.training.time_series_recipe import Recipe

SEQUENCES, DRAWS, FLOOR_STEPS = 24, 8, 1500


def run_folder(options: argparse.Namespace, rank: int, eta: float, seed: int) -> Path:
    """The folder of a finished run; trains where there is none."""
    form = "" if options.form == "mean" else f"{options.form}_"
    folder = options.runs / f"{form}rank-{rank}_eta-{eta:g}_seed-{seed}"
    if not (folder / "summary.json").exists():
        _, values = read_recipe("demo")
        ((name, given),) = values.pop("attention").items()
        attention = {name: {**given, "rank": rank, "eta": eta, "objective_form": options.form}}
        recipe = Recipe(**{**values, "attention": attention, "epochs": options.epochs, "seeds": [seed],
                           "threads": 1})  # fmt: skip
        train(recipe, folder, name="demo", progress=False)
    return folder


def leading(matrix: Tensor, count: int) -> Tensor:
    """Its ``count`` leading left singular vectors, (n, count)."""
    return torch.linalg.svd(matrix, full_matrices=False)[0][:, :count]


def angles(scores: Tensor, kernel: Tensor, count: int) -> tuple[float, float]:
    """(largest principal angle in degrees, mean squared cosine) of the two leading subspaces."""
    cosines = torch.linalg.svdvals(leading(scores, count).mT @ leading(kernel, count)).clamp_max(1.0)
    return torch.rad2deg(cosines[-1].arccos()).item(), cosines.square().mean().item()


def layer_inputs(model: nn.Module, split: object) -> Iterator[tuple[nn.Module, Tensor, int]]:
    """(layer, its input x (1, n, d), its index) for every layer and sequence, in float64."""
    layers = [module for module in model.modules() if isinstance(module, ka.PrimalAttention)]
    seen: dict[nn.Module, Tensor] = {}
    handles = [
        layer.register_forward_pre_hook(lambda module, args: seen.__setitem__(module, args[0]))
        for layer in layers
    ]
    for batch in make_loader(split.sequences[:SEQUENCES], 1):
        model(batch.x.double(), batch.attention_mask)
        for index, layer in enumerate(layers):
            yield layer, seen[layer][:, : int(batch.attention_mask.sum())], index
    for handle in handles:
        handle.remove()


def fit_to(layer: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """W_e and W_r that minimise the nested objective on the mean over these sequences."""
    every = [
        kernel_grams(
            *(layer.split_heads(proj(x)) for proj in (layer.q_proj, layer.k_proj)),
            rows=layer._sample(x, None, False)[0],
        )
        for x in inputs
    ]
    most = max(grams.rows.size(2) for grams in every)
    rows = [nn.functional.pad(grams.rows, (0, 0, 0, most - grams.rows.size(2))) for grams in every]
    together = KernelGrams(
        torch.cat([g.queries for g in every]), torch.cat([g.keys for g in every]), torch.cat(rows)
    )
    with torch.enable_grad():
        weights = [nn.init.orthogonal_(torch.empty_like(layer.w_e)).requires_grad_() for _ in range(2)]
        ones = torch.ones(layer.num_heads, layer.rank, dtype=layer.w_e.dtype)
        optimizer = torch.optim.Adam(weights, lr=0.03)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, FLOOR_STEPS)
        for _ in range(FLOOR_STEPS):
            optimizer.zero_grad()
            nested_objective(together, *weights, ones).mean().backward()
            optimizer.step()
            schedule.step()
    return [weight.detach() for weight in weights]


def measure(model: nn.Module, split: object, count: int, replaced: str = "") -> list[dict]:
    """One record for every layer, head and sequence.

    ``replaced``: "redrawn" or "fitted" weights W_e and W_r instead of the trained ones.
    """
    records, inputs, fitted = [], list(layer_inputs(model, split)), {}
    for layer, x, index in inputs:
        kernel, trained = layer.kernel_matrix(x)[0], (layer.w_e.clone(), layer.w_r.clone())
        if replaced == "fitted" and index not in fitted:
            fitted[index] = fit_to(layer, [other for _, other, place in inputs if place == index])
        for _ in range(DRAWS if replaced == "redrawn" else 1):
            if replaced == "redrawn":
                for weight in (layer.w_e, layer.w_r):
                    nn.init.orthogonal_(weight)
            if replaced == "fitted":
                layer.w_e.copy_(fitted[index][0])
                layer.w_r.copy_(fitted[index][1])
            e, r = layer.scores(x)
            for head, matrix in enumerate(kernel):
                left, right = angles(e[0, head], matrix, count), angles(r[0, head], matrix.mT, count)
                first = angles(e[0, head], matrix, 1)[0], angles(r[0, head], matrix.mT, 1)[0]
                records.append({
                    "layer": index,
                    "head": head,
                    "angle": (left[0] + right[0]) / 2,
                    "captured": (left[1] + right[1]) / 2,
                    "first_angle": sum(first) / 2,
                })  # fmt: skip
        layer.w_e.copy_(trained[0])
        layer.w_r.copy_(trained[1])
    return records


def random_subspaces(split: object, count: int) -> list[dict]:
    records = []
    for sequence in split.sequences[:SEQUENCES]:
        for _ in range(DRAWS):
            one, other = torch.randn(2, len(sequence), len(sequence), dtype=torch.float64)
            angle, captured = angles(one, other, count)
            records.append({"angle": angle, "captured": captured, "first_angle": angles(one, other, 1)[0]})
    return records


def mean(records: list[dict], key: str, layer: int | None = None) -> float:
    return statistics.fmean(r[key] for r in records if layer is None or r["layer"] == layer)


@torch.no_grad()
def examine(folder: Path, seed: int, options: argparse.Namespace) -> dict:
    """The figures of one run."""
    run = load_run(folder)
    split = run.test_split()
    model = run.model(seed).double()
    torch.manual_seed(seed)
    initial = build_model(run.recipe, run.facts)
    initial.encoder.set_scale(model.encoder.input_mean, model.encoder.input_std)
    found = {
        "trained": measure(model, split, options.count),
        "untrained": measure(initial.double().eval(), split, options.count),
        "redrawn": measure(model, split, options.count, replaced="redrawn"),
        "floor": measure(model, split, options.count, replaced="fitted"),
        "random": random_subspaces(split, options.count),
    }
    metrics = read_json(folder / f"seed-{seed}" / "metrics.json")
    layers = sorted({record["layer"] for record in found["trained"]})
    keys = ("angle", "captured", "first_angle")
    return {
        "accuracy": read_json(folder / f"seed-{seed}" / "evaluation.json")["accuracy"],
        "objective": [[row.get(f"objective_layer_{layer}") for row in metrics] for layer in layers],
        "weights": [
            [float(w.norm()) / layer.num_heads**0.5 for w in (layer.w_e, layer.w_r)]
            for layer in model.modules()
            if isinstance(layer, ka.PrimalAttention)
        ],
        **{
            kind: {key: [mean(records, key, None if kind == "random" else i) for i in layers] for key in keys}
            for kind, records in found.items()
        },
    }


def draw(rows: list[dict], options: argparse.Namespace) -> None:
    """A panel a rank, the angle against eta; last, J of the last layer over the training."""
    with report_style():
        figure = Figure(figsize=(10.4, 3.8))
        panels = figure.subplots(1, len(options.ranks) + 1)
        for rank, axis in zip(options.ranks, panels, strict=False):
            draw_angles(axis, [row for row in rows if row["rank"] == rank], options.etas)
            axis.set_title(f"rank {rank}")
        panels[0].set_ylabel(f"largest angle of the leading {options.count} (degrees)")
        axis, rank = panels[-1], options.ranks[0]
        for color, eta in zip(PALETTE, [eta for eta in options.etas if eta > 0], strict=False):
            curves = [row["objective"][-1] for row in rows if row["rank"] == rank and row["eta"] == eta]
            for number, curve in enumerate(curves):
                label = f"η {eta:g}" if number == 0 else None
                sizes = [abs(value) for value in curve]
                axis.plot(range(1, len(curve) + 1), sizes, color=color, linewidth=1.0, label=label)
        axis.set(title=f"|J| of the last layer, rank {rank}", yscale="log", xlabel="epoch")
        axis.legend(ncols=3, loc="upper right")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4,
                      handlelength=3.5)  # fmt: skip
        options.figure.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(options.figure, dpi=96)


def draw_angles(axis: Axes, rows: list[dict], etas: list[float]) -> None:
    """Means over the seeds with their deviation: a colour a kind, a line style a layer."""
    places = range(len(etas))
    for color, kind in zip(PALETTE, ("trained", "redrawn", "untrained", "random"), strict=False):
        for layer, style in ((0, "--"), (-1, "-")):
            if kind == "random" and layer == 0:
                continue
            values = [[row[kind]["angle"][layer] for row in rows if row["eta"] == eta] for eta in etas]
            label = kind if kind == "random" else f"{kind}, {'last' if layer else 'first'} layer"
            deviations = [statistics.stdev(v) if len(v) > 1 else 0.0 for v in values]
            means = [statistics.fmean(v) for v in values]
            axis.errorbar(places, means, deviations, color=color, linestyle=style, marker="o",
                          markersize=3.5, capsize=2, label=label)  # fmt: skip
    axis.set(ylim=(0, 90), xticks=places, xticklabels=[f"{eta:g}" for eta in etas], xlabel="η")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[20, 4])
    parser.add_argument("--etas", type=float, nargs="+", default=[0.0, 0.1, 1.0, 10.0])
    parser.add_argument("--form", default="mean", help="objective_form of the layers: mean, sum or nested")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--count", type=int, default=3, help="leading directions k that are compared")
    parser.add_argument("--runs", type=Path, default=Path("runs/singular-directions"))
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/singular-directions.json"))
    parser.add_argument("--figure", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for rank in options.ranks:
        for eta in options.etas:
            for seed in options.seeds:
                row = examine(run_folder(options, rank, eta, seed), seed, options)
                rows.append({"rank": rank, "eta": eta, "seed": seed, **row})
                shown = "  ".join(
                    f"{kind} " + "/".join(f"{a:.1f}" for a in row[kind]["angle"]) + " deg, cos2 "
                    + "/".join(f"{c:.3f}" for c in row[kind]["captured"])
                    for kind in ("trained", "redrawn", "untrained", "floor", "random")
                )  # fmt: skip
                print(f"rank {rank} eta {eta:g} seed {seed}  {row['accuracy']:.4f}  {shown}", flush=True)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    settings = {key: str(value) for key, value in vars(options).items()}
    options.out.write_text(json.dumps({"settings": settings, "rows": rows}, indent=1) + "\n")
    if options.figure is not None:
        draw(rows, options)


if __name__ == "__main__":
    main()
