"""A classifier of whole reviews converted: accuracy and milliseconds before and after, by mechanism.

  kernel-attention train equal_time/text --data_root DATA --max_seconds 1200 --short_convolution 4 --output R
  OMP_NUM_THREADS=1 python benchmarks/long_conversion.py R --data DATA

The model reads up to 2,048 bytes of a review of IMDb. All of its attention layers are converted with reviews
of the training split, without labels, drawn by the seed. Accuracy is that of evenly spaced reviews of the
test split. Times are CPU seconds of a forward pass on one review, cut at every length, medians over rounds in
which all models take turns.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kernel_attention as ka
from kernel_attention.series import Batch
from kernel_attention_lab.benchmarking.machine import write_rows
from kernel_attention_lab.data.tokens.batches import make_length_loader
from kernel_attention_lab.runs.saved import load_run

HEDGEHOG = {"feature_map": "hedgehog"}
MECHANISMS: dict[str, Any] = {
    "linear, elu": "linear",
    "linear, hedgehog": {"linear": HEDGEHOG},
    "primal_values, rank 32": {"primal_values": {"rank": 32, "normalize": "rows", **HEDGEHOG}},
    "ridge": "ridge",
}
LENGTHS, ROUNDS = (512, 1024, 2048), 7
CONVERSION, TESTED, BATCH = 192, 1000, 4
STEPS = 150


@torch.no_grad()
def predict(model: nn.Module, batches: Sequence[Batch]) -> Tensor:
    """The classes of all cases."""
    return torch.cat([model(*batch.arguments).argmax(-1) for batch in batches])


@torch.no_grad()
def milliseconds(models: dict[str, nn.Module], review: Tensor) -> dict[str, list[float]]:
    """CPU milliseconds of one review (1, N), cut at every length, the models by turns."""
    found: dict[str, list[float]] = {name: [] for name in models}
    for length in LENGTHS:
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(ROUNDS):
            for name, model in models.items():
                begin = time.process_time()
                model(review[:, :length])
                times[name].append(1000 * (time.process_time() - begin))
        for name, values in times.items():
            found[name].append(statistics.median(values))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("results/benchmarks/long_conversion.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    saved = load_run(options.run)
    experiment = saved.experiment(options.data)
    splits, trained = experiment.data, saved.model()  # type: ignore[attr-defined]
    tested = list(make_length_loader(splits.test.evenly(TESTED), BATCH))
    labels = torch.cat([batch.target for batch in tested])
    before = predict(trained, tested)
    rows = [{"row": "trained", "accuracy": float((before == labels).double().mean())}]
    timed: dict[str, nn.Module] = {"trained": trained}
    for seed in options.seeds:
        chosen = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(seed))
        unlabelled = make_length_loader(splits.train.subset(chosen[:CONVERSION].numpy()), BATCH)
        order = torch.Generator().manual_seed(seed)
        batches = [batch.arguments for batch in unlabelled]
        batches = [batches[i] for i in torch.randperm(len(batches), generator=order)]
        for name, spec in MECHANISMS.items():
            model = copy.deepcopy(trained)
            torch.manual_seed(seed)
            ka.replace_attention(model, {"all": spec})
            raw = predict(model, tested)
            model, begin = copy.deepcopy(trained), time.process_time()
            report = ka.convert_attention(model, {"all": spec}, batches, steps=STEPS, seed=seed, lengths=())
            seconds = time.process_time() - begin
            after = predict(model.eval(), tested)
            timed.setdefault(name, model)
            rows.append(
                {
                    "row": name, "seed": seed, "seconds": seconds, "errors": [x.error for x in report.layers],
                    "replaced": float((raw == labels).double().mean()),
                    "accuracy": float((after == labels).double().mean()),
                    "same": float((after == before).double().mean()),
                }
            )  # fmt: skip
            print(rows[-1], flush=True)
    longest = max((batch.x for batch in tested), key=lambda x: x.size(-1))[:1]
    for name, times in milliseconds(timed, longest).items():
        rows.append({"row": name, **{f"ms_{n}": value for n, value in zip(LENGTHS, times, strict=True)}})
    settings = {"steps": STEPS, "conversion": CONVERSION, "tested": TESTED, "rounds": ROUNDS}
    write_rows(options.out, rows, settings=settings)


if __name__ == "__main__":
    main()
