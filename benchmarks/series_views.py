"""The views of ``AttentionClassifier``'s closed form: what each is worth, and what a fit takes.

    python benchmarks/series_views.py views --data-root UEA --output results/series/views.jsonl
    python benchmarks/series_views.py folds --data-root UEA --name now --output results/series/folds.jsonl
    python benchmarks/series_views.py scale --output results/series/scale.jsonl

``views`` and ``folds`` read training splits alone. A record of ``views`` has the leave-one-out accuracy and
log-loss of the stack of all machines, of one machine alone, or of the stack without a machine; one of
``folds`` those of the closed form for a held-out part. ``scale`` fits and asks the whole
classifier, default arguments, on noise of growing numbers of cases, steps and channels, one process each, and
reports seconds of one thread's processor time and the peak of the process's memory beyond that before.
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

from kernel_attention.estimators import AttentionClassifier
from kernel_attention.series import SequenceSplit
from kernel_attention.series.closed_form import VIEWS_OF_LENGTHS, fit_temperature
from kernel_attention.series.machines import fit_closed_form
from kernel_attention.solvers.least_squares_svm import fit_weights

SETS = (
    "ArticularyWordRecognition", "BasicMotions", "FingerMovements", "Handwriting", "JapaneseVowels",
    "UWaveGestureLibrary",
)  # fmt: skip
QUANTITIES = ("fit (s)", "answer to 100 cases (s)", "memory (MiB)")
SIZES = {
    "cases": [(cases, 100, 3) for cases in (10, 100, 1000, 10_000)],
    "steps": [(100, steps, 3) for steps in (10, 100, 1000, 10_000)],
    "channels": [(100, 100, channels) for channels in (1, 10, 100, 1000)],
    "nothing": [(300, 200, 6), (10_000, 1000, 1)],
}


def views(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of every set."""
    records = []
    for name in options.sets:
        train = read_split(name, "train", options)
        classes, targets = np.unique(train.y, return_inverse=True)
        split = SequenceSplit([np.ascontiguousarray(case.T) for case in train.X], targets.astype(np.int64))
        found = fit_closed_form(split, len(classes), max(len(case) for case in split.sequences))
        every = list(found.scores)
        stacks = {"stack": every} | {f"{view} alone": [view] for view in every}
        # Without a view that a set does not have, its stack is the same.
        names = [*VIEWS_OF_LENGTHS, "all"]
        stacks |= {f"without {view}": [other for other in every if other != view] for view in names}
        for stack, members in stacks.items():
            scores = torch.stack([found.scores[member] for member in members])
            weights = fit_weights(scores, torch.from_numpy(split.targets))
            logits = torch.tensordot(weights, scores, dims=1)
            figured = figures(logits.softmax(dim=-1).numpy(), np.arange(len(classes)), targets)
            records.append({"dataset": name, "classifier": stack, "number": 0, **figured})
        print(name, {view: round(weight, 2) for view, weight in found.weights.items()}, flush=True)
    return records


def folds(options: argparse.Namespace) -> None:
    """Write the record of every fold of every set."""
    from sklearn.model_selection import StratifiedKFold

    torch.set_num_threads(1)
    for name in options.sets:
        train = read_split(name, "train", options)
        classes, targets = np.unique(train.y, return_inverse=True)
        cases = [np.ascontiguousarray(case.T) for case in train.X]
        count = min(options.folds, int(np.bincount(targets).max()))
        parts = StratifiedKFold(count, shuffle=True, random_state=options.seed).split(targets, targets)
        for number, (kept, held_out) in enumerate(parts):
            split = SequenceSplit([cases[place] for place in kept], targets[kept].astype(np.int64))
            started = time.process_time()
            seed, most = options.seed + number, max(map(len, split.sequences))
            found = fit_closed_form(split, len(classes), most, seed=seed)
            seconds = round(time.process_time() - started, 2)
            logits = found.module.predict([cases[place] for place in held_out]).double()
            logits = logits / fit_temperature(found.left_out, torch.from_numpy(split.targets))
            figured = figures(logits.softmax(dim=-1).numpy(), np.arange(len(classes)), targets[held_out])
            record = {"dataset": name, "classifier": options.name, "number": number, **figured}
            record |= {"test_cases": len(held_out), "fit_seconds": seconds}
            with options.output.open("a") as file:
                file.write(json.dumps(record) + "\n")
            print(record, flush=True)


def scale(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The records of every size, each from a process of its own; those in the output are kept."""
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    records = [json.loads(line) for line in lines]
    known = {(record["varied"], record["size"]) for record in records}
    for varied, sizes in SIZES.items():
        for size in sizes:
            number = dict(zip(("cases", "steps", "channels"), size, strict=True)).get(varied, size[0])
            if (varied, number) in known or number > options.most:
                continue
            command = [sys.executable, __file__, "one", "--size", *map(str, size)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            print(varied, done.stdout, end="", flush=True)
            found = json.loads(done.stdout)
            for quantity in QUANTITIES:
                key = {"dataset": f"{varied} {number}", "classifier": quantity, "number": 0}
                records.append(key | {"varied": varied, "size": number, "value": found[quantity]} | found)
            options.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    return records


def one(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The record of one size."""
    torch.set_num_threads(1)
    cases, steps, channels = options.size
    X = np.random.default_rng(0).standard_normal((cases, channels, steps), dtype=np.float32)
    y = np.arange(cases) % 2
    few = np.random.default_rng(0).standard_normal((20, 1, 10), dtype=np.float32)
    AttentionClassifier(random_state=0, epochs=1).fit(few, np.arange(20) % 2)  # loads what is loaded once
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    classifier = AttentionClassifier(random_state=0).fit(X, y)
    fitted = time.process_time()
    classifier.predict_proba(X[:100])
    figures = (fitted - started, (time.process_time() - fitted) * 100 / min(cases, 100))
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    record = {"cases": cases, "steps": steps, "channels": channels}
    record |= dict(zip(QUANTITIES, (*(round(figure, 2) for figure in figures), round(peak)), strict=True))
    print(json.dumps(record))
    return [record]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("views", "folds", "scale", "one"))
    parser.add_argument("--output", type=Path, help="file of records, one JSON object a line")
    parser.add_argument("--sets", nargs="+", default=SETS)
    parser.add_argument("--most-cases", type=int, default=1000)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0, help="of the folds and, with their number, of a fit")
    parser.add_argument("--name", default="closed form", help="of the classifier in the records of ``folds``")
    parser.add_argument("--size", nargs=3, type=int, help="cases, steps and channels of ``one``")
    parser.add_argument("--most", type=int, default=10_000, help="largest number of ``scale``")
    parser.add_argument("--data-root", help="folder of the archive's zip files")
    options = parser.parse_args()
    records = {"views": views, "folds": folds, "scale": scale, "one": one}[options.what](options)
    if options.output and options.what == "views":
        options.output.write_text("".join(json.dumps(record) + "\n" for record in records))


if __name__ == "__main__":
    main()
