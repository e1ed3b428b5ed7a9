"""The last layer of a trained softmax classifier made a primal one: what each initialisation is worth.

    kernel-attention train demo --attention softmax --seeds 0 1 2 --threads 1 --output runs/softmax-demo
    OMP_NUM_THREADS=1 python benchmarks/primal_from_softmax.py runs/softmax-demo

For every seed of the run: the relative error of the layer's output on the training sequences it was fitted to
and on the test sequences, and the model's test accuracy before and after one more epoch of training, all
parameters, with the run's own recipe. "new" is a layer as replace_attention puts it in: random weights,
carried projections. "distilled" is primal attention with values, fitted by the nested objective, with either
normalisation, and "new values" such a layer with random weights. "zero" is one that puts out 0: what the
model makes of its residual path alone. "softmax" is the model itself with one more epoch. Every
initialisation sees the same order of batches. No result chooses anything.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
from pathlib import Path
from typing import Any

import torch
from lightning_fabric import seed_everything
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.analysis import primal_from_softmax, primal_values_from_softmax
from kernel_attention.series import SequenceSplit, make_loader, stratified_split
from kernel_attention.series.task import SequenceTask
from kernel_attention.training.loop import fit
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.training.evaluation import evaluate_split
from kernel_attention_lab.training.saved import SavedRun, load_run

METHODS = ("svd", "values", "random", "new", "zero")
WITH_VALUES = ("distilled, output", "distilled, keys", "new values, output")


@torch.no_grad()
def inputs_of_last_layer(model: nn.Module, split: SequenceSplit) -> tuple[Tensor, Tensor]:
    """(x, attention_mask) of the last attention layer on a whole split."""
    batch = next(iter(make_loader(split, len(split))))
    seen: list[Tensor] = []
    layer = model.encoder.layers[-1].attention
    handle = layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(batch.x, batch.attention_mask)
    handle.remove()
    return seen[0], batch.attention_mask


def fine_tune(model: nn.Module, run: SavedRun, train: SequenceSplit, seed: int) -> nn.Module:
    """One epoch by the run's recipe."""
    recipe = dataclasses.replace(run.recipe, epochs=1, seeds=[seed], threads=1)
    seed_everything(seed, verbose=False)
    loader = make_loader(train, recipe.batch_size, shuffle=True, seed=seed)
    fit(SequenceTask(model.train(), recipe), loader, None, progress=False)
    return model.eval()


@torch.no_grad()
def relative_error(layer: nn.Module, wanted: nn.Module, x: Tensor, mask: Tensor) -> float:
    target = wanted(x, attention_mask=mask)[mask]
    return ((layer(x, attention_mask=mask)[mask] - target).norm() / target.norm()).item()


def initialised(
    model: nn.Module, method: str, options: dict[str, Any], seed: int, train: Any, test: Any
) -> dict[str, Any]:
    """A copy of the model with a primal last layer, and the errors of its output."""
    changed = copy.deepcopy(model)
    last = changed.encoder.layers[-1]
    if method in ("new", "zero"):
        torch.manual_seed(seed)
        ka.replace_attention(changed, {-1: "primal"}, **options)
        if method == "zero":
            nn.init.zeros_(last.attention.out_proj.weight)
            nn.init.zeros_(last.attention.out_proj.bias)
        before = model.encoder.layers[-1].attention
        errors = [relative_error(last.attention, before, *split) for split in (train, test)]
        return {"model": changed, "error": errors[0], "held_out_error": errors[1]}
    found = primal_from_softmax(
        last.attention, train[0], attention_mask=train[1], held_out=test[0], held_out_mask=test[1],
        method=method, seed=seed, **options,
    )  # fmt: skip
    last.attention = found.layer
    errors = {"error": found.error, "held_out_error": found.held_out_error}
    return {"model": changed, **errors, "constant_error": found.constant_error}


def with_values(model: nn.Module, method: str, rank: int, seed: int, train: Any, test: Any) -> dict[str, Any]:
    """A copy of the model whose last layer is primal attention with values, and the errors of its output."""
    changed = copy.deepcopy(model)
    last = changed.encoder.layers[-1]
    how, normalize = method.split(", ")
    if how == "new values":
        before = last.attention
        torch.manual_seed(seed)
        ka.replace_attention(changed, {-1: "primal_values"}, rank=rank, normalize=normalize)
        errors = [relative_error(last.attention, before, *split) for split in (train, test)]
        return {"model": changed, "error": errors[0], "held_out_error": errors[1]}
    found = primal_values_from_softmax(
        last.attention, train[0], attention_mask=train[1], held_out=test[0], held_out_mask=test[1], rank=rank,
        normalize=normalize, seed=seed,
    )  # fmt: skip
    last.attention = found.layer
    return {"model": changed, "error": found.error, "held_out_error": found.held_out_error}


def measure(run: SavedRun, seed: int, ranks: list[int]) -> list[dict[str, Any]]:
    recipe = run.recipe
    data = load_time_series(recipe.dataset)
    train, _ = stratified_split(data.train, recipe.validation_fraction, seed, data.task)
    model = run.model(seed)
    fitted, unseen = (inputs_of_last_layer(model, split) for split in (train, data.test))

    def accuracy(of: nn.Module) -> float:
        return evaluate_split(of, data.test, recipe, is_regression=False)["accuracy"]

    before = accuracy(model)
    after = accuracy(fine_tune(copy.deepcopy(model), run, train, seed))
    rows = [{"method": "softmax", "seed": seed, "before": before, "after": after}]
    for rank in ranks:
        for method in WITH_VALUES:
            row = with_values(model, method, rank, seed, fitted, unseen)
            changed = row.pop("model")
            row |= {"before": accuracy(changed)}
            row |= {"after": accuracy(fine_tune(changed, run, train, seed))}
            rows.append({"method": method, "seed": seed, "rank": rank, "data_dependent": "values", **row})
    for data_dependent in (True, False):
        for rank in ranks:
            options = {"rank": rank, "data_dependent": data_dependent, "max_len": model.encoder.max_len}
            for method in METHODS:
                row = initialised(model, method, options, seed, fitted, unseen)
                changed = row.pop("model")
                row |= {"before": accuracy(changed)}
                row |= {"after": accuracy(fine_tune(changed, run, train, seed))}
                rows.append({"method": method, "seed": seed, **options, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="folder of a trained softmax run")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/primal-from-softmax.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_run(options.run)
    rows = [row for seed in run.seeds for row in measure(run, seed, options.ranks)]
    cases: dict[tuple, list[dict]] = {}
    for row in rows:
        cases.setdefault((row.get("data_dependent"), row.get("rank"), row["method"]), []).append(row)
    print(
        "| weights | rank | initialisation | error, fitted | error, test | before (%) | after one epoch (%) |"
    )
    print("|---|---|---|---|---|---|---|")
    for (dependent, rank, method), found in cases.items():
        shown = []
        for key, factor, digits in (("error", 1, 3), ("held_out_error", 1, 3), ("before", 100, 2),
                                    ("after", 100, 2)):  # fmt: skip
            values = [factor * row[key] for row in found if row.get(key) is not None]
            spread = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
            shown.append(f"{statistics.fmean(values):.{digits}f}{spread}" if values else "–")
        weights = {None: "–", True: "data-dependent", False: "data-independent", "values": "with values"}[
            dependent
        ]
        print(f"| {weights} | {rank or '–'} | {method} | " + " | ".join(shown) + " |")
    constant = [row["constant_error"] for row in rows if "constant_error" in row]
    print(f"best constant output: error {statistics.fmean(constant):.3f}")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
