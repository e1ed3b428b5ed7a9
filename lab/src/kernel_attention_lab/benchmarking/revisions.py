"""Two revisions of the code, timed against each other: what got slower or faster beyond the noise?

A round runs the same plan once with each revision, in two processes one after the other. A fair coin decides
which comes first. Both then meet the same slow minutes of the machine. A contender's ratio is taken within
the round, and the coin makes the test of these ratios exact, see ``joint_sign_flip_test``.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import machine

LEVEL = 0.01
"""The chance that any contender is called slower where none is."""
LEAST_CHANGE = 1.03
"""Ratios nearer to 1 are not reported: where a process finds its memory changes times by a few percent."""
LEAST_ROUNDS = 7
"""Fewer rounds have no outcome as rare as ``LEVEL``."""
ROUNDS = 11
_PACKAGE = Path(__file__).parents[1]
_PASSES = 9  # of every contender in a process; their lower quartile enters, which other work disturbs least

Key = tuple[str, str, str]  # setting as JSON, contender, pass


class BenchmarkFailedError(RuntimeError):
    """A process that timed a revision failed."""


def measure_against(
    reference: str,
    arguments: Sequence[str],
    *,
    rounds: int = ROUNDS,
    seed: int = 0,
    on_progress: Callable[[str], None] = lambda line: None,
    package: Path | None = None,
) -> dict[str, Any]:
    """Time the code that runs, with its uncommitted changes, against a revision of its checkout.

    Args:
        reference: any name that git has for a commit.
        arguments: what ``kernel-attention bench`` should measure: contenders, sizes, a suite.
        rounds: rounds of two processes.
        seed: seed of the coins.
        on_progress: called with a line about the current measurement.
        package: a folder of the checkout; None: that of the package that runs.

    Returns:
        A record of JSON's types. ``rows`` has the medians of both in seconds, and the ratio, new over old,
        with its quartiles and "slower", "faster" or "" as ``verdict``.

    Raises:
        InputError: outside a checkout, for an unknown revision, too few rounds, or a plan that a revision
            does not have.
        BenchmarkFailedError: where a process failed otherwise.
    """
    if rounds < LEAST_ROUNDS:
        raise InputError(
            f"rounds={rounds} must be at least {LEAST_ROUNDS} with --against: fewer cannot tell noise apart"
        )
    package = _PACKAGE if package is None else package
    checkout = _checkout(package)
    commit = _commit(checkout, reference)
    order = random.Random(seed)
    times: dict[str, list[dict[Key, float]]] = {"old": [], "new": []}
    load = machine.load()
    with _worktree(checkout, commit) as tree, tempfile.TemporaryDirectory() as scratch:
        trees = {"old": tree, "new": checkout}
        for name, checked_out in trees.items():
            if not (checked_out / "src" / "kernel_attention" / "__init__.py").is_file():
                raise InputError(f"--against {reference}: that revision has no kernel_attention in src")
            _require_import(name, checked_out, scratch)
        for turn in range(rounds):
            for place, name in enumerate(order.sample(["old", "new"], 2)):
                revision = reference if name == "old" else "the working tree"
                on_progress(f"round {turn + 1} of {rounds}: {revision}")
                folder = Path(scratch) / f"{turn}-{place}"
                times[name].append(_run(trees[name], arguments, folder, turn, revision))
    return {
        "reference": reference,
        "commit": commit,
        "rounds": rounds,
        "seed": seed,
        "level": LEVEL,
        "least_change": LEAST_CHANGE,
        "command": ["kernel-attention", *sys.argv[1:]],
        "machine": {**machine.describe_machine(set()), "load_before": load, "load_after": machine.load()},
        **_compared(reference, times),
    }


def _checkout(package: Path) -> Path:
    """The top folder of the checkout that tracks the package."""
    try:  # a repository around an installed copy does not track it
        _git(package, "ls-files", "--error-unmatch", "__init__.py")
        return Path(_git(package, "rev-parse", "--show-toplevel"))
    except (OSError, subprocess.CalledProcessError):
        raise InputError(
            f"--against needs a git checkout of this project, and {package} is not tracked by one"
        ) from None


def _commit(checkout: Path, reference: str) -> str:
    try:
        return _git(
            checkout, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{reference}^{{commit}}"
        )
    except subprocess.CalledProcessError:
        raise InputError(f"--against {reference!r}: git knows no such revision in {checkout}") from None


@contextlib.contextmanager
def _worktree(checkout: Path, commit: str) -> Iterator[Path]:
    """The commit in a temporary worktree."""
    with tempfile.TemporaryDirectory(prefix="kernel-attention-") as folder:
        tree = Path(folder).resolve() / "tree"
        try:
            _git(checkout, "worktree", "add", "--detach", "--quiet", str(tree), commit)
        except subprocess.CalledProcessError as error:
            raise InputError(f"--against: git could not check {commit} out: {error.stderr.strip()}") from None
        try:
            yield tree
        finally:
            _git(checkout, "worktree", "remove", "--force", str(tree))


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _environment(tree: Path) -> dict[str, str]:
    """The environment in which Python imports the packages of ``tree``."""
    before = os.environ.get("PYTHONPATH")
    places = [str(tree / "src"), str(tree / "lab" / "src"), *([before] if before else [])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(places)}


def _require_import(name: str, tree: Path, folder: str) -> None:
    """Raise unless a process imports this very tree."""
    command = [sys.executable, "-c", "import kernel_attention; print(kernel_attention.__file__)"]
    found = subprocess.run(
        command, cwd=folder, env=_environment(tree), capture_output=True, text=True, check=False
    )
    if Path(found.stdout.strip()) != tree / "src" / "kernel_attention" / "__init__.py":
        said = found.stdout.strip() or _last_line(found.stderr)
        raise BenchmarkFailedError(f"Python does not import the {name} tree {tree}: {said}")


def _program(tree: Path) -> str:
    """The module that is the command line; revisions without the laboratory have it in the library."""
    has_laboratory = (tree / "lab" / "src" / "kernel_attention_lab" / "__init__.py").is_file()
    return "kernel_attention_lab" if has_laboratory else "kernel_attention"


def _run(tree: Path, arguments: Sequence[str], folder: Path, seed: int, revision: str) -> dict[Key, float]:
    """The lower quartile of the seconds of every contender and pass, in a process of its own."""
    folder.mkdir()
    command = [sys.executable, "-m", _program(tree), "bench", *arguments, "--rounds", str(_PASSES)]
    command += ["--memory", "false", "--flops", "false", "--seed", str(seed), "--output", str(folder)]
    done = subprocess.run(
        command, cwd=folder, env=_environment(tree), capture_output=True, text=True, check=False
    )
    if done.returncode == 2:
        raise InputError(f"{revision} cannot measure this: {_last_line(done.stderr).removeprefix('error: ')}")
    if done.returncode:
        raise BenchmarkFailedError(f"{revision}: exit code {done.returncode}: {_last_line(done.stderr)}")
    record = json.loads((folder / "benchmark.json").read_text(encoding="utf-8"))
    return {
        (json.dumps(cell["setting"], sort_keys=True), row["contender"], kind): figures["lower"]
        for cell in record["cells"]
        for row in cell["rows"]
        for kind, figures in row.get("time", {}).items()
    }


def _last_line(text: str) -> str:
    return next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no message")


def _compared(reference: str, times: dict[str, list[dict[Key, float]]]) -> dict[str, Any]:
    """The rows of what both have, and the names of what one of them lacks."""
    has = {name: set.intersection(*map(set, runs)) for name, runs in times.items()}
    keys = [key for key in times["new"][0] if key in has["old"] & has["new"]]
    if not keys:
        raise InputError(
            f"--against {reference}: it shares no contender at the same sizes with the working tree"
        )
    old, new = (np.array([[run[key] for key in keys] for run in times[name]]) for name in ("old", "new"))
    logs = np.log(new / old)
    chances = {"slower": joint_sign_flip_test(logs), "faster": joint_sign_flip_test(-logs)}
    rows = []
    for index, (setting, contender, kind) in enumerate(keys):
        lower, middle, upper = (float(q) for q in np.exp(np.quantile(logs[:, index], [0.25, 0.5, 0.75])))
        far = abs(math.log(middle)) >= math.log(LEAST_CHANGE)
        verdict = "slower" if middle > 1 else "faster"
        rows.append(
            {
                "contender": contender, "pass": kind, "setting": json.loads(setting),
                "old": statistics.median(old[:, index].tolist()),
                "new": statistics.median(new[:, index].tolist()),
                "ratio": middle, "ratio_lower": lower, "ratio_upper": upper,
                "chance": float(chances[verdict][index]),
                "verdict": verdict if far and chances[verdict][index] <= LEVEL else "",
                "ratios": np.exp(logs[:, index]).tolist(),
            }
        )  # fmt: skip
    lacking = {
        name: sorted({contender for _, contender, _ in has[other] - has[name]})
        for name, other in (("old", "new"), ("new", "old"))
    }
    return {"rows": rows, "lacking": lacking}


def joint_sign_flip_test(differences: np.ndarray, *, draws: int = 20_000, seed: int = 0) -> np.ndarray:
    """The exact paired randomization test of several quantities, one-sided, adjusted for their number.

    Each block (a round of measurements, say) gives one difference for every quantity, and a fair coin decided
    in it which of the two sides came first. If the sides do not differ, all differences of a block might as
    well have the other sign. The statistic of a quantity is its mean over its root mean square, which no
    flip changes; one quantity with a wide spread does not hide the others. The test compares it with the
    largest one over all quantities under the same flips (Westfall and Young 1993), so the chance of *any*
    false alarm is the level, however the quantities depend on one another.

    Args:
        differences: (blocks, quantities).
        draws: flips that are drawn where there are more than that many; fewer are all tried.
        seed: of the draws.

    Returns:
        (quantities,) the probability that the largest statistic is at least as large as the quantity's own.

    Raises:
        InputError: for other shapes, or numbers that are not finite.
    """
    values = np.asarray(differences, dtype=np.float64)
    if values.ndim != 2 or not values.size or not np.isfinite(values).all():
        raise InputError(f"differences of shape {values.shape} must be finite numbers, (blocks, quantities)")
    blocks = len(values)
    size = np.sqrt(np.square(values).sum(axis=0))
    scaled = values / np.where(size > 0, size, 1.0)
    if 2**blocks <= draws:
        flips = 1.0 - 2.0 * (np.arange(2**blocks)[:, None] >> np.arange(blocks) & 1)
    else:
        flips = np.random.default_rng(seed).choice((-1.0, 1.0), size=(draws, blocks))
        flips[0] = 1.0  # what was observed is one of the possibilities
    largest = (flips @ scaled).max(axis=1)
    found = scaled.sum(axis=0)
    return (largest[:, None] >= found - 1e-12).mean(axis=0)
