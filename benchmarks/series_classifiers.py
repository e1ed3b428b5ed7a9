"""``AttentionClassifier`` beside aeon's classifiers on multivariate sets of the UEA archive.

    python benchmarks/series_classifiers.py --output results/series/test.jsonl
    python benchmarks/series_classifiers.py --cross-validate ablation --output ablation.jsonl
    python benchmarks/series_classifiers.py --cross-validate mechanisms --output mechanisms.jsonl

The first form fits on the training splits and reports the test splits, with every seed. The others compare
variants of ``AttentionClassifier`` by cross-validation on the training splits alone and read no test case:
``variants`` of one member, the ``ablation`` of the parts of four members, ``mechanisms`` in one member.
A (set, classifier, fold or seed) is one line of JSON in the output, written when it is done; a second call
with the same output does what is missing. ``make results`` makes the tables of docs/time-series.md.

Series of different lengths go to aeon's classifiers resampled to the longest training length. Ours takes them
as they are. Splits with more than ``--most-cases`` cases are replaced by that many of them, evenly over the
classes. aeon's linear classifiers give probabilities of 0 and 1, so those of every classifier are clipped to
1e-6 for the log-loss. Workers are processes of one thread, whose processor time is reported.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
import warnings
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

SETS = (
    "SpokenArabicDigits", "LSST", "FingerMovements", "ArticularyWordRecognition", "SelfRegulationSCP1",
    "JapaneseVowels", "UWaveGestureLibrary", "Handwriting", "BasicMotions",
)  # fmt: skip
SMALL_TESTS = ("AtrialFibrillation", "StandWalkJump")
"""Sets of 15 test cases: reported, and no part of a mean."""

RIVALS: dict[str, tuple[str, dict[str, Any]]] = {
    "multirocket_hydra": ("convolution_based.MultiRocketHydraClassifier", {}),
    "minirocket": ("convolution_based.MiniRocketClassifier", {}),
    # The window is a share of the length; without it, long series take hours.
    "dtw_1nn": (
        "distance_based.KNeighborsTimeSeriesClassifier",
        {"n_neighbors": 1, "distance": "dtw", "distance_params": {"window": 0.1}},
    ),
    "quant": ("interval_based.QUANTClassifier", {}),
    "hydra": ("convolution_based.HydraClassifier", {}),
    "rdst": ("shapelet_based.RDSTClassifier", {}),
    "catch22": ("feature_based.Catch22Classifier", {}),
}
WITHOUT_SEED = ("dtw_1nn",)

# What differs from the defaults of AttentionClassifier.
MEMBERS: dict[str, Any] = {"closed_form": False, "n_estimators": 4}
WARPED = ("jitter", "scale", "time_warp", "window")
SINGLE: dict[str, Any] = {
    "closed_form": False, "n_estimators": 1, "calibrate": False,
    "stem": "convolution", "augmentation": WARPED,
}  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "stem: rocket": {"stem": "rocket"},
    "stem: rocket, augmentation: none": {"stem": "rocket", "augmentation": ()},
}
# What each part of four members alone is worth: one is switched off or exchanged, or the readout is on.
ABLATION: dict[str, dict[str, Any]] = {
    "whole": {},
    "with a readout": {"readout": True},
    "with linear attention": {"attention": "linear"},
    "without an ensemble": {"n_estimators": 1},
    "without learnt convolutions": {"stem": "rocket"},
    "without augmentation": {"augmentation": ()},
    "without positions": {"positions": "none"},
    "without random convolutions": {"stem": "convolution"},
}
COMPARISONS = {
    "variants": {name: SINGLE | changes for name, changes in VARIANTS.items()},
    "ablation": {name: MEMBERS | changes for name, changes in ABLATION.items()},
    # The mechanism matters most where a series has most tokens: with learnt convolutions, up to 128 of them.
    "mechanisms": {name: SINGLE | {"attention": name} for name in ("primal", "softmax", "linear", "rpc")},
}
OURS: dict[str, dict[str, Any]] = {
    "attention": {},
    "members alone": MEMBERS,
    **{f"members alone, {name}": MEMBERS | {"attention": name} for name in ("softmax", "linear", "rpc")},
}


class Job(NamedTuple):
    """One fit: a set, a classifier or variant, and a fold (cross-validation) or a seed."""

    dataset: str
    classifier: str
    number: int


class Cases(NamedTuple):
    """Series (c, n_i) and their labels."""

    X: list[np.ndarray]
    y: np.ndarray

    def take(self, indices: np.ndarray) -> Cases:
        """The cases at these indices."""
        return Cases([self.X[index] for index in indices], self.y[indices])


def read_split(name: str, split: str, options: argparse.Namespace) -> Cases:
    """A split from the files of the archive; of a large one, cases evenly over the classes."""
    from kernel_attention_lab.data import load_time_series

    data = getattr(load_time_series(name, options.data_root), split)
    cases = Cases([sequence.T for sequence in data.sequences], data.targets)
    most = options.most_cases
    if len(cases.y) <= most:
        return cases
    chosen: list[int] = []
    for label in np.unique(cases.y):
        found = np.flatnonzero(cases.y == label)
        count = min(max(round(most * len(found) / len(cases.y)), 2), len(found))
        chosen += found[np.linspace(0, len(found) - 1, count).round().astype(int)].tolist()
    return cases.take(np.sort(chosen))


def equal_lengths(X: list[np.ndarray], length: int) -> np.ndarray:
    """The series resampled to one length, linearly in time, (n, c, length); float64, for catch22."""
    places = np.linspace(0.0, 1.0, length)

    def resampled(series: np.ndarray) -> np.ndarray:
        known = np.linspace(0.0, 1.0, series.shape[1])
        return np.stack([np.interp(places, known, channel) for channel in series])

    whole = (series if series.shape[1] == length else resampled(series) for series in X)
    return np.stack([series.astype(np.float64) for series in whole])


def make_rival(name: str, seed: int) -> Any:
    path, given = RIVALS[name]
    module, _, kind = path.partition(".")
    chosen = given if name in WITHOUT_SEED else {"random_state": seed}
    return getattr(import_module(f"aeon.classification.{module}"), kind)(**chosen)


def make_ours(changes: dict[str, Any], seed: int, cases: int, options: argparse.Namespace) -> Any:
    from kernel_attention.estimators import AttentionClassifier
    from kernel_attention.series.members import automatic_batch_size, automatic_epochs

    given = {"random_state": seed, "accelerator": options.accelerator} | changes
    if options.steps is not None:
        given["epochs"] = automatic_epochs(cases, automatic_batch_size(cases), options.steps)
    return AttentionClassifier(**given)


def figures(probabilities: np.ndarray, classes: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """Accuracy, log-loss, and the expected calibration error in ten bins of equal width."""
    own = np.where(classes == y[:, None], probabilities, 0.0).sum(axis=1)
    right = classes[probabilities.argmax(axis=1)] == y
    confidence = probabilities.max(axis=1)
    bins = np.minimum((confidence * 10).astype(int), 9)
    error = sum(
        abs(right[bins == b].mean() - confidence[bins == b].mean()) * (bins == b).mean()
        for b in np.unique(bins)
    )
    return {
        "accuracy": float(right.mean()),
        "log_loss": float(-np.log(own.clip(1e-6)).mean()),
        "calibration_error": float(error),
    }


def run(job: Job, options: argparse.Namespace) -> dict[str, Any]:
    """The record of a job."""
    from sklearn.model_selection import StratifiedKFold

    train = read_split(job.dataset, "train", options)
    if options.cross_validate:
        folds = StratifiedKFold(options.folds, shuffle=True, random_state=0).split(train.y, train.y)
        kept, held_out = list(folds)[job.number]
        train, test, seed = train.take(kept), train.take(held_out), 0
        changes = COMPARISONS[options.cross_validate].get(job.classifier, {})
    else:
        test, seed = read_split(job.dataset, "test", options), job.number
        changes = OURS.get(job.classifier, {})
    is_rival = job.classifier in RIVALS
    X: Any = train.X
    X_test: Any = test.X
    if is_rival:
        classifier = make_rival(job.classifier, seed)
        length = max(series.shape[1] for series in X)
        X, X_test = equal_lengths(X, length), equal_lengths(X_test, length)
    else:
        classifier = make_ours(changes, seed, len(train.y), options)
    on_gpu = options.accelerator == "gpu" and not is_rival
    clock = time.perf_counter if on_gpu else time.process_time
    started = clock()
    classifier.fit(X, train.y)
    fitted = clock()
    probabilities = np.asarray(classifier.predict_proba(X_test), dtype=np.float64)
    times = {"fit_seconds": fitted - started, "predict_seconds": clock() - fitted}
    return {
        **job._asdict(),
        "accelerator": "cpu" if is_rival else options.accelerator,
        **figures(probabilities, np.asarray(classifier.classes_), test.y),
        **{key: round(value, 2) for key, value in times.items()},
        "train_cases": len(train.y),
        "test_cases": len(test.y),
    }


def prepare_worker(threads: int) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(threads)


def jobs_of(options: argparse.Namespace) -> list[Job]:
    """What the output lacks, fold by fold or seed by seed, so that the first ones are complete early."""
    numbers = range(options.folds) if options.cross_validate else options.seeds
    lines = options.output.read_text().splitlines() if options.output.exists() else []
    done = {tuple(json.loads(line)[key] for key in Job._fields) for line in lines if line.strip()}
    jobs = [
        Job(name, classifier, number)
        for number in numbers
        for classifier in options.classifiers
        for name in options.sets
        if number == numbers[0] or classifier not in WITHOUT_SEED
    ]
    return [job for job in jobs if tuple(job) not in done]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="file of records, one JSON object a line")
    parser.add_argument("--cross-validate", choices=COMPARISONS, help="what to compare on training splits")
    parser.add_argument(
        "--sets", nargs="+", help="default: all; in cross-validation without the smallest two"
    )
    parser.add_argument("--classifiers", nargs="+", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--most-cases", type=int, default=1000, help="largest number of cases of a split")
    parser.add_argument("--steps", type=int, help="steps of a fit of ours; default: the classifier's own")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1, help="of every worker")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu", help="of our classifiers")
    parser.add_argument("--data-root", help="folder of the archive's zip files")
    options = parser.parse_args()
    ours = COMPARISONS.get(options.cross_validate, OURS)
    # Parts and mechanisms are compared with one another, variants with the best rival too.
    rivals = {"ablation": 0, "mechanisms": 0, "variants": 1}.get(options.cross_validate, len(RIVALS))
    options.classifiers = options.classifiers or [*list(RIVALS)[:rivals], *ours]
    options.sets = options.sets or [*SETS, *(() if options.cross_validate else SMALL_TESTS)]
    for classifier in options.classifiers:
        if classifier not in (known := [*RIVALS, *ours]):
            parser.error(f"classifier {classifier!r} must be one of: {', '.join(known)}")
    for library in ("OMP", "MKL", "NUMBA", "OPENBLAS"):  # read by the workers when they import it
        os.environ[f"{library}_NUM_THREADS"] = str(options.threads)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    spawn = multiprocessing.get_context("spawn")
    with (
        ProcessPoolExecutor(options.workers, spawn, prepare_worker, (options.threads,)) as pool,
        options.output.open("a") as file,
    ):
        waiting = {pool.submit(run, job, options): job for job in jobs_of(options)}
        for count, future in enumerate(as_completed(waiting), start=1):
            job = ", ".join(map(str, waiting[future]))
            if error := future.exception():
                print(f"{count} of {len(waiting)}: {job}: {error!r}", flush=True)
                continue
            record = future.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(f"{count} of {len(waiting)}: {job}: {100 * record['accuracy']:.1f} %", flush=True)


if __name__ == "__main__":
    main()
