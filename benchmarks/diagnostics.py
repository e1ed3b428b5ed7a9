"""Do the papers' qualitative claims about attention hold on models trained here? Measured, not assumed.

    python benchmarks/diagnostics.py --threads 1 --out benchmarks/results/diagnostics.json

Trains the demo recipe (JapaneseVowels) with each mechanism and seed, diagnoses 64 test sequences before and
after, and J_proj of 16 of them before training and after every epoch. Two more softmax models have four
layers, for the claim about depth, one of them with pre-norm layers as the papers' vision transformers. The
table has one line a claim and model, with the figure of every seed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import seed_everything

import kernel_attention as ka
from kernel_attention.models import SequenceClassifier
from kernel_attention.series import Standardizer, make_loader, stratified_split
from kernel_attention.series.task import SequenceTask
from kernel_attention.training.loop import Training, fit
from kernel_attention.training.observer import Observer
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.training.evaluation import evaluate_split
from kernel_attention_lab.training.facts import describe_data
from kernel_attention_lab.training.recipe_files import read_recipe
from kernel_attention_lab.training.run import build_model
from kernel_attention_lab.training.time_series_recipe import Recipe

MECHANISMS = ("softmax", "batch_norm", "scaled_heads", "batch_norm_scaled_heads", "symmetric", "rpc")
PROJECTED = ("softmax", "symmetric", "rpc")  # those with a kernel-PCA reading
TRAJECTORY_CASES, FINAL_CASES = 16, 64


class Trajectory(Observer):
    """J_proj of the same sequences before training and after every epoch: layer -> mean and median."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.means: list[list[float]] = []
        self.medians: list[list[float]] = []

    def on_train_start(self, training: Training) -> None:
        """The untrained model."""
        self._measure(training.task.model)

    def on_round_end(self, training: Training) -> None:
        """The model after an epoch."""
        self._measure(training.task.model)

    def _measure(self, model: torch.nn.Module) -> None:
        report = ka.analysis.diagnose(model, self.batches, cases=TRAJECTORY_CASES, quantities=["projection"])
        errors = [layer.values["projection_error"] for layer in report.layers]
        self.means.append([float(error.mean()) for error in errors])
        self.medians.append([float(error.median()) for error in errors])


def train(recipe: Recipe, seed: int, with_trajectory: bool) -> dict[str, Any]:
    """Train one seed as a run does, and measure the model of the last epoch."""
    data = load_time_series(recipe.dataset)
    seed_everything(seed, verbose=False)
    train_split, val_split = stratified_split(data.train, recipe.validation_fraction, seed, data.task)
    model: SequenceClassifier = build_model(recipe, describe_data(data))
    scale = Standardizer.fit(train_split.sequences)
    model.encoder.set_scale(torch.from_numpy(scale.mean), torch.from_numpy(scale.std))
    every = max(len(data.test.sequences) // FINAL_CASES, 1)  # the split is sorted by class
    cases = data.test.sequences[::every][:FINAL_CASES]
    batches = [(batch.x, batch.attention_mask) for batch in make_loader(cases, 16)]
    few = cases[:: FINAL_CASES // TRAJECTORY_CASES]
    trajectory = Trajectory([(batch.x, batch.attention_mask) for batch in make_loader(few, 16)])
    before = diagnosed(model, batches)
    fit(
        SequenceTask(model, recipe),
        make_loader(train_split, recipe.batch_size, shuffle=True, seed=seed),
        make_loader(val_split, recipe.batch_size),
        observers=[trajectory] if with_trajectory else [],
        progress=False,
    )
    return {
        "accuracy": evaluate_split(model, data.test, recipe, False)["accuracy"],
        "untrained": before,
        **diagnosed(model, batches),
        "projection_mean": trajectory.means,
        "projection_median": trajectory.medians,
    }


def diagnosed(model: torch.nn.Module, batches: list[Any]) -> dict[str, Any]:
    """Summary and mean explained variance of every layer."""
    quantities = ["spectrum", "distance", "projection"]
    report = ka.analysis.diagnose(model, batches, cases=FINAL_CASES, quantities=quantities)
    return {
        "layers": [layer.summary() for layer in report.layers],
        "explained_variance": [layer.explained_variance.mean(0)[:8].tolist() for layer in report.layers],
    }


def lines(found: dict[str, list[dict[str, Any]]]) -> list[tuple[str, str, str]]:
    """(claim, model, figures of the seeds) of what the runs say."""
    rows = []

    def add(claim: str, name: str, figures: list[str]) -> None:
        rows.append((claim, name, "; ".join(figures)))

    for name, seeds in found.items():
        add("accuracy", name, [f"{seed['accuracy']:.4f}" for seed in seeds])
        for kind in ("mean", "median"):
            curves = [seed[f"projection_{kind}"] for seed in seeds]
            if curves[0]:
                add(
                    f"J_proj ({kind}) first -> last epoch, by layer", name, [_fall(curve) for curve in curves]
                )
        for when, part in (("", seeds), (", untrained", [seed["untrained"] for seed in seeds])):
            first = [[curve[0] for curve in seed["explained_variance"]] for seed in part]
            add("variance of the first value by layer" + when, name, [_joined(values) for values in first])
            for key in ("effective_rank", "gamma_spread", "gamma_eigenvalue", "gamma_cosine"):
                if key in part[0]["layers"][0]:
                    add(f"{key} by layer{when}", name, [_joined(_of(seed, key)) for seed in part])
            for key in ("head_distance", "output_distance"):
                means = [statistics.fmean(_of(seed, key)) for seed in part]
                add(key + when, name, [f"{value:.3f}" for value in means])
    return rows


def _of(seed: dict[str, Any], key: str) -> list[float]:
    return [layer[key] for layer in seed["layers"] if key in layer]


def _joined(values: list[float]) -> str:
    return " / ".join(f"{value:.3g}" for value in values)


def _fall(curve: list[list[float]]) -> str:
    return " / ".join(f"{first:.3g} -> {last:.3g}" for first, last in zip(curve[0], curve[-1], strict=True))


def draw(found: dict[str, list[dict[str, Any]]], path: Path) -> None:
    """Explained variance by depth before (dashed) and after training, J_proj by epoch; means of the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10.5, 3.3), layout="constrained")
    panels = list(figure.subplots(1, 3))
    deep = [name for name in found if ", 4 " in name]
    for axis, name in zip(panels, deep, strict=False):
        for part, style in (("untrained", "--"), ("", "-")):
            curves = [(seed[part] if part else seed)["explained_variance"] for seed in found[name]]
            for layer, curve in enumerate(torch.tensor(curves).mean(0)):
                axis.plot(
                    range(1, 9), curve, style, color=f"C{layer}", label=None if part else f"layer {layer}"
                )
        axis.set(title=name, xlabel="singular values", ylabel="explained variance", ylim=(0.6, 1.01))
        axis.legend()
    for name in found:
        if found[name][0]["projection_median"]:
            curves = torch.tensor([seed["projection_median"] for seed in found[name]])
            panels[-1].plot(curves[..., -1].mean(0), label=name)
    panels[-1].set(title="J_proj of the last layer (median)", xlabel="epoch")
    panels[-1].legend(loc="upper right", fontsize="small")
    figure.savefig(path, dpi=130)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    parser.add_argument("--figure", type=Path, help="draw them to this file")
    return parser.parse_args()


def main() -> None:
    options = parse()
    keys = read_recipe("demo")[1] | {"epochs": options.epochs, "threads": options.threads}
    models = {name: keys | {"attention": name} for name in options.mechanisms}
    if "softmax" in models:
        models["softmax, 4 layers"] = models["softmax"] | {"num_layers": 4}
        models["softmax, 4 pre-norm"] = models["softmax, 4 layers"] | {"norm_first": True}
    found: dict[str, list[dict[str, Any]]] = {}
    for seed in options.seeds:  # seeds outside: every model has a figure early
        for name, values in models.items():
            recipe = Recipe(**values)
            found.setdefault(name, []).append(train(recipe, seed, name.partition(",")[0] in PROJECTED))
            print(f"{name}, seed {seed}: accuracy {found[name][-1]['accuracy']:.4f}", flush=True)
            if options.out:
                options.out.parent.mkdir(parents=True, exist_ok=True)
                options.out.write_text(json.dumps(found, indent=1))
    if options.figure:
        draw(found, options.figure)
    for claim, name, figures in lines(found):
        print(f"{name:24} {claim:44} {figures}")


if __name__ == "__main__":
    main()
