"""The last layer of a trained softmax classifier made a primal one: what each initialisation is worth.

    kernel-attention train demo --attention softmax --seeds 0 1 2 --threads 1 --output runs/softmax-demo
    OMP_NUM_THREADS=1 python benchmarks/primal_from_softmax.py runs/softmax-demo

For every seed of the run: the relative error of the layer's output on the training sequences it was fitted to
and on the test sequences, and the model's test accuracy before and after one more epoch of training, all
parameters, with the run's own recipe. "new" is a layer as replace_attention puts it in: random weights,
carried projections. "distilled" is primal attention with values, fitted by the nested objective, with either
normalisation, and "new values" such a layer with random weights. "zero" is one that puts out 0: what the
model makes of its residual path alone. "softmax" is the model itself with one more epoch. Every
initialisation sees the same order of batches. No result chooses anything. ``make results`` makes the
table of docs/concepts/low-rank-attention.md.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
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
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.data import load_time_series
from kernel_attention_lab.runs.saved import SavedRun, load_run
from kernel_attention_lab.tasks.time_series import evaluate_split

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
    before, seen = last.attention, {"attention_mask": train[1], "held_out": test[0], "held_out_mask": test[1]}
    how, _, normalize = method.partition(", ")
    if how == "distilled":
        found = primal_values_from_softmax(
            before, train[0], **seen, rank=options["rank"], normalize=normalize, seed=seed
        )
    elif how not in ("new", "zero", "new values"):
        found = primal_from_softmax(before, train[0], **seen, method=method, seed=seed, **options)
    else:
        torch.manual_seed(seed)
        given = {"rank": options["rank"], "normalize": normalize} if normalize else options
        ka.replace_attention(changed, {-1: "primal_values" if normalize else "primal"}, **given)
        if how == "zero":
            nn.init.zeros_(last.attention.out_proj.weight)
            nn.init.zeros_(last.attention.out_proj.bias)
        errors = [relative_error(last.attention, before, *split) for split in (train, test)]
        return {"model": changed, "error": errors[0], "held_out_error": errors[1]}
    last.attention = found.layer
    errors = {"error": found.error, "held_out_error": found.held_out_error}
    constant = {} if normalize else {"constant_error": found.constant_error}
    return {"model": changed, **errors, **constant}


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
    kinds = [("values", method) for method in WITH_VALUES]
    kinds += [(data_dependent, method) for data_dependent in (True, False) for method in METHODS]
    for rank in ranks:
        for kind, method in kinds:
            options = {"rank": rank, "data_dependent": kind, "max_len": model.encoder.max_len}
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
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/primal_from_softmax.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    run = load_run(options.run)
    rows = [row for seed in run.seeds for row in measure(run, seed, options.ranks)]
    for row in rows:
        print(", ".join(f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"
                        for key, value in row.items()))  # fmt: skip
    write_rows(options.out, rows)


if __name__ == "__main__":
    main()
