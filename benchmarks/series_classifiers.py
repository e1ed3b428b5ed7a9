"""``AttentionClassifier`` beside aeon's classifiers on multivariate sets of the UEA archive.

    python benchmarks/series_classifiers.py --output series.jsonl
    python benchmarks/series_classifiers.py --cross-validate variants --output variants.jsonl
    python benchmarks/series_classifiers.py --cross-validate ablation --output ablation.jsonl
    python benchmarks/series_classifiers.py --cross-validate mechanisms --output mechanisms.jsonl
    python benchmarks/series_classifiers.py --table series.jsonl

The first form fits on the training splits and reports the test splits, with every seed. The second compares
variants of ``AttentionClassifier`` by cross-validation on the training splits alone and reads no test case.
The third does the same with the whole classifier, its default arguments, and each of its parts switched off
or exchanged. The fourth compares four mechanisms in one member that learns its convolutions.
With ``--members`` a member that several of these have in common is trained once and kept in a folder.
Every (set, classifier, fold or seed) is one line of JSON in the output, written when it is done; a second
call with the same output does what is missing. ``--table`` prints the means of such a file.

Sets whose series differ in length go to aeon's classifiers resampled to the longest training length,
linearly in time. Ours takes them as they are. Splits with more than ``--most-cases`` cases are replaced by
that many of them, evenly over the classes. aeon's linear classifiers give probabilities of 0 and 1, so that
probabilities are clipped to 1e-6 for the log-loss of every classifier.

Workers are processes of one thread. With ``--accelerator gpu``, ``--gpu-workers`` of them train on the GPU
and take the largest sets first; the others, on the CPU, the smallest.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import tempfile
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS")

SETS = (
    "SpokenArabicDigits", "LSST", "FingerMovements", "ArticularyWordRecognition", "SelfRegulationSCP1",
    "JapaneseVowels", "UWaveGestureLibrary", "Handwriting", "BasicMotions",
)  # fmt: skip
SMALL_TESTS = ("AtrialFibrillation", "StandWalkJump")
"""Sets of 15 test cases: reported, and no part of a mean."""

WITHOUT_SEED = ("dtw_1nn",)
RIVALS = ("multirocket_hydra", "minirocket", "dtw_1nn", "catch22")

# What differs from the defaults of AttentionClassifier. One member and no temperature: the records hold the
# log-probabilities of every case, from which ensembles of any variants follow.
WARPED = ("jitter", "scale", "time_warp", "window")
SINGLE: dict[str, Any] = {
    "n_estimators": 1, "calibrate": False, "stem": "convolution", "augmentation": WARPED,
}  # fmt: skip
# "steps_factor" multiplies --steps.
VARIANTS: dict[str, dict[str, Any]] = {
    "default": {},
    "stem: rocket": {"stem": "rocket"},
    "stem: rocket, augmentation: none": {"stem": "rocket", "augmentation": ()},
    "stem: linear": {"stem": "linear"},
    "augmentation: none": {"augmentation": ()},
    "views: three": {"views": ("raw", "normalized", "difference")},
    "stem: wide": {"embed_dim": 128, "feedforward_dim": 256},
    "stem: deep": {"stem_layers": 6},
    "positions: relative": {"positions": "convolutional"},
    "mixup": {"mixup": 0.4},
    "steps: twice": {"steps_factor": 2},
    "views: raw": {"views": ("raw",)},
    "dropout: 0.3": {"dropout": 0.3},
    "pooling: attention": {"pooling": "attention"},
    "augmentation: with cut": {"augmentation": (*WARPED, "cut")},
    "learning rate: 5e-4": {"learning_rate": 5e-4},
    "default, another seed": {"random_state": 1},
}
# What each part of the default classifier is worth: one is switched off or exchanged, or the readout is on.
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
# The mechanism matters most where a series has most tokens: with learnt convolutions, up to 128 of them.
MECHANISMS: dict[str, dict[str, Any]] = {
    name: SINGLE | {"attention": name} for name in ("primal", "softmax", "linear", "rpc")
}
COMPARISONS = {
    "variants": {name: SINGLE | changes for name, changes in VARIANTS.items()},
    "ablation": ABLATION,
    "mechanisms": MECHANISMS,
}
OURS: dict[str, dict[str, Any]] = {
    "attention": {},
    "attention, softmax": {"attention": "softmax"},
    "attention, linear": {"attention": "linear"},
    "attention, rpc": {"attention": "rpc"},
}


MOST_FAILURES = 3
"""Failed fits after which a worker gets no more: a machine's fault would use up all jobs."""


class Job(NamedTuple):
    """One fit: a set, a classifier or variant, and a fold (cross-validation) or a seed."""

    dataset: str
    classifier: str
    number: int


class Cases(NamedTuple):
    """Series (c, n_i), their labels, and the share of the cases of the archive that they are."""

    X: list[np.ndarray]
    y: np.ndarray

    def take(self, indices: np.ndarray) -> Cases:
        """The cases at these indices."""
        return Cases([self.X[index] for index in indices], self.y[indices])


def load(name: str, split: str, options: argparse.Namespace) -> Cases:
    """A split of a set, or ``--most-cases`` of its cases, from ``--cache`` where it is there."""
    if options.cache is None:
        return read_split(name, split, options)
    path = options.cache / f"{name}-{split}-{options.most_cases}.npz"
    if not path.exists():
        cases = read_split(name, split, options)
        options.cache.mkdir(parents=True, exist_ok=True)
        values = np.concatenate([series.T for series in cases.X])
        lengths = np.array([series.shape[1] for series in cases.X])
        with tempfile.NamedTemporaryFile(dir=options.cache, suffix=".npz", delete=False) as file:
            np.savez_compressed(file, values=values, lengths=lengths, y=cases.y)
        Path(file.name).replace(path)
    with np.load(path) as arrays:
        parts = np.split(arrays["values"], arrays["lengths"].cumsum()[:-1])
        return Cases([part.T for part in parts], arrays["y"])


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


def folds_of(cases: Cases, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Stratified folds of the training split, the same for every variant."""
    from sklearn.model_selection import StratifiedKFold

    return list(StratifiedKFold(count, shuffle=True, random_state=0).split(cases.y, cases.y))


def equal_lengths(X: list[np.ndarray], length: int) -> np.ndarray:
    """The series resampled to one length, linearly in time, (n, c, length); float64, for catch22."""
    places = np.linspace(0.0, 1.0, length)

    def resampled(series: np.ndarray) -> np.ndarray:
        known = np.linspace(0.0, 1.0, series.shape[1])
        return np.stack([np.interp(places, known, channel) for channel in series])

    whole = (series if series.shape[1] == length else resampled(series) for series in X)
    return np.stack([series.astype(np.float64) for series in whole])


def make_rival(name: str, seed: int) -> Any:
    if name == "multirocket_hydra":
        from aeon.classification.convolution_based import MultiRocketHydraClassifier

        return MultiRocketHydraClassifier(random_state=seed)
    if name == "minirocket":
        from aeon.classification.convolution_based import MiniRocketClassifier

        return MiniRocketClassifier(random_state=seed)
    if name == "dtw_1nn":
        from aeon.classification.distance_based import KNeighborsTimeSeriesClassifier

        window = {"window": 0.1}  # of the length; without a band, long series take hours
        return KNeighborsTimeSeriesClassifier(n_neighbors=1, distance="dtw", distance_params=window)
    if name == "catch22":
        from aeon.classification.feature_based import Catch22Classifier

        return Catch22Classifier(random_state=seed)
    raise ValueError(f"classifier {name!r} must be one of {', '.join(RIVALS)}")


def make_ours(options: dict[str, Any], seed: int, cases: int, steps: int | None, accelerator: str) -> Any:
    from kernel_attention.estimators import AttentionClassifier
    from kernel_attention.series.members import automatic_batch_size, automatic_epochs

    options = {"random_state": seed, "accelerator": accelerator} | options
    steps_factor = options.pop("steps_factor", 1)
    if steps is not None:
        steps *= steps_factor
        options["epochs"] = automatic_epochs(cases, automatic_batch_size(cases), steps)
    return AttentionClassifier(**options)


def measure(classifier: Any, train: Cases, test: Cases, *, as_array: bool) -> dict[str, Any]:
    """Fit, predict, and the figures of it."""
    X, X_test = train.X, test.X
    if as_array:
        length = max(series.shape[1] for series in X)
        X, X_test = equal_lengths(X, length), equal_lengths(X_test, length)  # type: ignore[assignment]
    started = time.perf_counter()
    classifier.fit(X, train.y)
    fitted = time.perf_counter()
    probabilities = np.asarray(classifier.predict_proba(X_test), dtype=np.float64)
    ended = time.perf_counter()
    return {
        **figures(probabilities, np.asarray(classifier.classes_), test.y),
        "fit_seconds": round(fitted - started, 2),
        "predict_seconds": round(ended - fitted, 2),
        "train_cases": len(train.y),
        "test_cases": len(test.y),
        "classes": [int(label) for label in classifier.classes_],
        "log_probabilities": np.log(probabilities.clip(1e-6)).round(3).tolist(),
        "targets": test.y.tolist(),
    }


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


def run(job: Job, options: argparse.Namespace, accelerator: str) -> dict[str, Any]:
    """The record of a job."""
    from kept_members import kept_members

    train = load(job.dataset, "train", options)
    if options.cross_validate:
        kept, held_out = folds_of(train, options.folds)[job.number]
        train, test, seed = train.take(kept), train.take(held_out), 0
        changes = COMPARISONS[options.cross_validate].get(job.classifier, {})
    else:
        test = load(job.dataset, "test", options)
        seed, changes = job.number, OURS.get(job.classifier, {})
    is_rival = job.classifier in RIVALS
    if is_rival:
        classifier = make_rival(job.classifier, seed)
    else:
        classifier = make_ours(changes, seed, len(train.y), options.steps, accelerator)
    with kept_members(options.members) as saved:
        record = measure(classifier, train, test, as_array=is_rival)
    record["fit_seconds"] = round(record["fit_seconds"] + sum(saved), 2)
    return {**job._asdict(), "accelerator": "cpu" if is_rival else accelerator, **record}


def work(connection: Connection, options: argparse.Namespace, accelerator: str) -> None:
    """Do the jobs that come, until None comes."""
    import logging
    import warnings

    import torch

    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(options.threads)
    connection.send(None)
    while (job := connection.recv()) is not None:
        try:
            connection.send(run(job, options, accelerator))
        except Exception:
            connection.send({**job._asdict(), "error": traceback.format_exc(limit=-4)})


def read(path: Path) -> list[dict[str, Any]]:
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    """Steps of a batch of every set, roughly: what decides whether a GPU helps."""
    sizes = {}
    for name in options.sets:
        cases = load(name, "train", options)
        longest = max(series.shape[1] for series in cases.X)
        sizes[name] = min(longest, 128) * min(max(len(cases.y) // 8, 8), 64)
    return sizes


def jobs_of(options: argparse.Namespace) -> list[Job]:
    numbers = range(options.folds) if options.cross_validate else options.seeds
    finished = {
        (record["dataset"], record["classifier"], record["number"])
        for record in read(options.output)
        if "error" not in record
    }
    jobs = [
        Job(name, classifier, number)
        for classifier in options.classifiers
        for number in numbers
        for name in options.sets
        if number == numbers[0] or classifier not in WITHOUT_SEED
    ]
    return [job for job in jobs if tuple(job) not in finished]


def choose(
    pending: list[Job], failed: set[Job], worker: Worker, sizes: dict[str, int], group: int
) -> Job | None:
    """The next job of a worker: rivals first for a worker that fits them, else ours by size.

    Ours come in groups of ``group`` classifiers, and fold by fold or seed by seed, so that the first ones are
    complete if the time is up.
    A job that has failed goes to the CPU.
    """
    if worker.accelerator == "gpu":
        pending = [job for job in pending if job not in failed]
    rivals = [job for job in pending if job.classifier in RIVALS]
    if worker.has_rival and rivals:
        return rivals[0]
    ours = [job for job in pending if job.classifier not in RIVALS]
    first = list(dict.fromkeys(job.classifier for job in ours))[:group]
    ours = [job for job in ours if job.classifier in first]
    sign = -1 if worker.accelerator == "gpu" else 1
    return min(ours, key=lambda job: (job.number, sign * sizes[job.dataset]), default=None)


class Worker:
    """A process that fits one job after the other.

    Args:
        options: those of the command.
        accelerator: where it trains, "cpu" or "gpu".
        has_rival: whether it fits aeon's classifiers, which every process compiles anew.
    """

    def __init__(self, options: argparse.Namespace, accelerator: str, has_rival: bool) -> None:
        self.accelerator, self.has_rival, self.failures = accelerator, has_rival, 0
        self.job: Job | None = None
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, options, accelerator), daemon=True)
        self.process.start()
        theirs.close()  # so that the end of the process is the end of the connection

    def start(self, job: Job | None) -> None:
        """Begin a job; None ends the process."""
        self.job = job
        self.connection.send(job)

    def result(self) -> dict[str, Any] | None:
        """The record of the job, or None where there was no job yet."""
        try:
            record = self.connection.recv()
        except EOFError:
            self.failures = MOST_FAILURES
            return None if self.job is None else {**self.job._asdict(), "error": "the process ended"}
        self.failures += record is not None and "error" in record
        return record


def perform(options: argparse.Namespace) -> None:
    """Hand the jobs to the workers and write the records."""
    jobs, sizes, started = jobs_of(options), sizes_of(options), time.monotonic()
    for variable in THREADS:  # read by the workers' libraries when they are imported
        os.environ[variable] = str(options.threads)
    on_cpu = options.workers - (options.gpu_workers if options.accelerator == "gpu" else 0)
    workers = [
        Worker(options, "cpu" if index < on_cpu else "gpu", index < options.rival_workers)
        for index in range(options.workers)
    ]
    active = {worker.connection: worker for worker in workers}
    print(f"{len(jobs)} fits, {on_cpu} workers on the CPU, {options.workers - on_cpu} on the GPU", flush=True)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    seconds = 60 * (options.minutes or math.inf)
    failed: set[Job] = set()
    count = 0
    with options.output.open("a") as file:
        while active:
            left = seconds + 60 - (time.monotonic() - started)
            ready = wait(list(active), timeout=None if math.isinf(left) else max(left, 0))
            if not ready:
                print("time is up; fits under way are lost", flush=True)
                break
            for connection in ready:
                worker = active[connection]
                record = worker.result()
                if record is not None:
                    count += 1
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    report(record, count, time.monotonic() - started)
                    if "error" in record and worker.job not in failed:
                        failed.add(worker.job)
                        jobs.insert(0, worker.job)  # once more, perhaps elsewhere
                job = None
                if time.monotonic() - started < seconds and worker.failures < MOST_FAILURES:
                    job = choose(jobs, failed, worker, sizes, options.group)
                if worker.failures < MOST_FAILURES or worker.process.is_alive():
                    worker.start(job)
                if job is None:
                    del active[connection]
                else:
                    jobs.remove(job)
    for worker in workers:
        worker.process.terminate()
    print(f"{len(jobs)} fits left, {time.monotonic() - started:.0f} s", flush=True)


def report(record: dict[str, Any], count: int, seconds: float) -> None:
    what = f"{count} {seconds:.0f}s {record['dataset']} | {record['classifier']} | {record['number']}"
    if "error" in record:
        print(f"{what}: {record['error']}", flush=True)
    else:
        print(
            f"{what}: {100 * record['accuracy']:.1f} %, log-loss {record['log_loss']:.3f}, "
            f"{record['fit_seconds']:.0f} s on {record['accelerator']}",
            flush=True,
        )


def rows_of(records: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, float], float, float, float]]:
    """(classifier, accuracy by set, mean accuracy, mean log-loss, mean calibration error)."""
    found: dict[str, dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "error" not in record:
            found[record["classifier"]][record["dataset"]].append(record)
    for classifier, by_set in found.items():
        means = {
            key: {name: float(np.mean([record[key] for record in each])) for name, each in by_set.items()}
            for key in ("accuracy", "log_loss", "calibration_error")
        }
        averaged = [name for name in by_set if name not in SMALL_TESTS]
        is_whole = set(SETS) <= set(averaged)
        overall = [
            float(np.mean([means[key][name] for name in averaged])) if is_whole else math.nan for key in means
        ]
        yield classifier, means["accuracy"], overall[0], overall[1], overall[2]


def table(path: Path) -> None:
    """Print accuracy in per cent: one row a classifier, one column a set, means over the sets last."""
    names = [*SETS, *SMALL_TESTS]
    rows = sorted(rows_of(read(path)), key=lambda row: -row[2] if row[2] == row[2] else 0.0)
    print(" ".join(["classifier".ljust(26), *(name[:6].rjust(6) for name in names), "  mean   loss    ece"]))
    for classifier, by_set, accuracy, loss, error in rows:
        cells = [f"{100 * by_set[name]:6.1f}" if name in by_set else "     -" for name in names]
        print(" ".join([classifier.ljust(26), *cells, f"{100 * accuracy:6.2f} {loss:6.3f} {error:6.3f}"]))


def keep(path: Path, kept: Path) -> None:
    """Write the records of finished fits without the figures of single cases."""
    left_out = ("log_probabilities", "targets", "classes")
    records = [record for record in read(path) if "error" not in record]
    lines = [json.dumps({key: record[key] for key in record if key not in left_out}) for record in records]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text("".join(f"{line}\n" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="file of records, one JSON object a line")
    parser.add_argument(
        "--keep", type=Path, help="with --table: write the records there, without single cases"
    )
    parser.add_argument("--table", type=Path, help="print the means of a file of records and stop")
    parser.add_argument(
        "--cross-validate", choices=COMPARISONS, help="what to compare on the training splits alone"
    )
    parser.add_argument(
        "--sets", nargs="+", help="default: all; in cross-validation without the smallest two"
    )
    parser.add_argument("--classifiers", nargs="+", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folds", type=int, default=2)
    parser.add_argument("--most-cases", type=int, default=1000, help="largest number of cases of a split")
    parser.add_argument("--steps", type=int, help="steps of a fit of ours; default: the classifier's own")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--gpu-workers", type=int, default=8, help="with --accelerator gpu")
    parser.add_argument("--rival-workers", type=int, default=1, help="workers that fit aeon's classifiers")
    parser.add_argument("--threads", type=int, default=1, help="of every worker")
    parser.add_argument("--accelerator", choices=("cpu", "gpu"), default="cpu")
    parser.add_argument("--minutes", type=float, help="start no fit after this time; stop all a minute later")
    parser.add_argument("--group", type=int, default=4, help="classifiers that are worked on at a time")
    parser.add_argument("--data-root", help="folder of the archive's zip files")
    parser.add_argument(
        "--cache", type=Path, help="folder for the splits that were read, which are then quick"
    )
    parser.add_argument("--members", type=Path, help="folder of trained members, which fits then share")
    parser.add_argument("--prepare", action="store_true", help="fill the cache and stop")
    options = parser.parse_args()
    if options.table:
        table(options.table)
        if options.keep:
            keep(options.table, options.keep)
        return
    if options.output is None and not options.prepare:
        parser.error("--output is needed")
    ours = COMPARISONS.get(options.cross_validate, OURS)
    known = [*RIVALS, *ours]
    if options.classifiers is None:
        # Parts and mechanisms are compared with one another, variants with the best rival too.
        rivals = {"ablation": 0, "mechanisms": 0, "variants": 1}.get(options.cross_validate, len(RIVALS))
        options.classifiers = [*RIVALS[:rivals], *ours]
    if options.sets is None:
        options.sets = [*SETS, *(() if options.cross_validate else SMALL_TESTS)]
    for classifier in options.classifiers:
        if classifier not in known:
            parser.error(f"classifier {classifier!r} must be one of: {', '.join(known)}")
    if options.prepare:
        for name in options.sets:
            for split in ("train",) if options.cross_validate else ("train", "test"):
                print(name, split, len(load(name, split, options).y), flush=True)
        return
    perform(options)


if __name__ == "__main__":
    main()
