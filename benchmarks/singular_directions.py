"""How near the layers that Primal-Attention trains come to the singular directions of their own kernels.

    python benchmarks/singular_directions.py --figure angles.svg
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
import statistics
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.functional import KernelGrams, kernel_grams, nested_objective
from kernel_attention.series import make_loader
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.evidence.plots import draw_figure
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs.recipe_files import read_recipe
from kernel_attention_lab.runs.run import train
from kernel_attention_lab.runs.saved import load_run
from kernel_attention_lab.tasks.registry import build_model
from kernel_attention_lab.tasks.time_series import Recipe

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


def figure_of(rows: list[dict], options: argparse.Namespace) -> str:
    """Largest angles over eta: a panel a rank, a line a kind and layer, with their range over the seeds."""
    kinds = [(kind, place) for kind in ("trained", "redrawn", "untrained") for place in ("first", "last")]
    observations = [
        {"rank": row["rank"], "eta": f"{row['eta']:g}", "line": f"{kind}, {place} layer",
         "angle": row[kind]["angle"][-1 if place == "last" else 0]}
        for row in rows
        for kind, place in [*kinds, ("random", "last")]
    ]  # fmt: skip
    axes = {"xlabel": "η", "ylim": (0, 90), "ylabel": f"largest angle of {options.count} (degrees)"}
    spec = {"line": "line", "panel": "'rank %d' % rank", "x": "eta", "y": "angle", "ticks": "{{ eta }}"}
    return draw_figure({**spec, "band": 0.15, "marked": True, "axes": axes}, observations) or ""


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
                kinds = ("trained", "redrawn", "untrained", "floor", "random")
                shown = "  ".join(f"{kind} {np.round(row[kind]['angle'], 1)}" for kind in kinds)
                print(f"rank {rank} eta {eta:g} seed {seed}  {row['accuracy']:.4f}  {shown}", flush=True)
    write_rows(options.out, rows, settings={key: str(value) for key, value in vars(options).items()})
    if options.figure is not None:
        options.figure.write_text(figure_of(rows, options), encoding="utf-8")


if __name__ == "__main__":
    main()
