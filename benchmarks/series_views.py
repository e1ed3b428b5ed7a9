"""The views of ``AttentionClassifier``'s closed form: what each is worth, and what a fit takes.

    python benchmarks/series_views.py views --data-root UEA --output results/series/views.jsonl
    python benchmarks/series_views.py scale --output scale.jsonl

``views`` reads training splits alone. A record has the leave-one-out accuracy and log-loss of the stack of
all machines, of one machine alone, or of the stack without a machine. ``scale`` fits and asks the closed form
on noise of growing numbers of cases, steps and channels, one process each, and reports seconds of one
thread's CPU time and the peak of the process's memory beyond that before the fit.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from series_classifiers import figures, read_split

from kernel_attention.series import SequenceSplit
from kernel_attention.series.closed_form import VIEWS, fit_closed_form, fit_weights

SETS = (
    "ArticularyWordRecognition", "BasicMotions", "FingerMovements", "Handwriting", "JapaneseVowels",
    "UWaveGestureLibrary",
)  # fmt: skip
SIZES = [
    *((cases, 200, 6) for cases in (10, 100, 1000, 10_000)),
    *((300, steps, 6) for steps in (10, 100, 1000)),
    *((300, 200, channels) for channels in (1, 10, 100)),
    (10_000, 1000, 6),
]


def views(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of every set."""
    records = []
    for name in options.sets:
        train = read_split(name, "train", options)
        classes, targets = np.unique(train.y, return_inverse=True)
        split = SequenceSplit([np.ascontiguousarray(case.T) for case in train.X], targets.astype(np.int64))
        found = fit_closed_form(split, len(classes), max(len(case) for case in split.sequences))
        every = [*VIEWS, "all"]
        stacks = {"stack": every} | {f"{view} alone": [view] for view in every}
        stacks |= {f"without {view}": [other for other in every if other != view] for view in every}
        for stack, members in stacks.items():
            scores = torch.stack([found.scores[member] for member in members])
            weights = fit_weights(scores, torch.from_numpy(split.targets))
            logits = torch.tensordot(weights, scores, dims=1)
            figured = figures(logits.softmax(dim=-1).numpy(), np.arange(len(classes)), targets)
            records.append({"dataset": name, "classifier": stack, "number": 0, **figured})
        print(name, {view: round(weight, 2) for view, weight in found.weights.items()}, flush=True)
    return records


def scale(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of every size, each from a process of its own."""
    records = []
    for size in SIZES:
        command = [sys.executable, __file__, "one", "--size", *map(str, size)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        print(done.stdout, end="", flush=True)
        records.append(json.loads(done.stdout))
    return records


def one(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The record of one size."""
    torch.set_num_threads(1)
    cases, steps, channels = options.size
    generator = np.random.default_rng(0)
    series = list(generator.normal(size=(cases, steps, channels)).astype(np.float32))
    split = SequenceSplit(series, np.arange(cases) % 2)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    found = fit_closed_form(split, 2, steps)
    fitted = time.process_time()
    found.module.predict(series[:100])
    record = {
        "cases": cases, "steps": steps, "channels": channels, "fit_seconds": round(fitted - started, 2),
        "predict_seconds_of_100": round((time.process_time() - fitted) * 100 / min(cases, 100), 2),
        "mebibytes": round((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024),
    }  # fmt: skip
    print(json.dumps(record))
    return [record]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("views", "scale", "one"))
    parser.add_argument("--output", type=Path, help="file of records, one JSON object a line")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--most-cases", type=int, default=1000)
    parser.add_argument("--size", nargs=3, type=int, help="cases, steps and channels of ``one``")
    parser.add_argument("--data-root", help="folder of the archive's zip files")
    options = parser.parse_args()
    records = {"views": views, "scale": scale, "one": one}[options.what](options)
    if options.output:
        options.output.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
