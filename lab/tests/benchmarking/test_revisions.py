"""Two revisions against each other: a tiny package whose benchmark takes the time that its code says."""

from __future__ import annotations

import itertools
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.benchmarking import revisions
from kernel_attention_lab.benchmarking.revisions import (
    LEAST_ROUNDS,
    BenchmarkFailedError,
    joint_sign_flip_test,
    measure_against,
)

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed")

# Every process finds another speed of the machine, the same for both of a round; the last digits differ.
BENCH = """
import json, pathlib, random, sys
COST = {"dense": 1.0, "linear": 1.0}
words = sys.argv[1:]
seed, folder = (words[words.index(name) + 1] for name in ("--seed", "--output"))
machine = random.Random(seed).uniform(1, 3)
own = random.Random(seed + __file__)
rows = [
    {"contender": name, "time": {kind: {"lower": cost * machine * own.uniform(0.98, 1.02)}
     for kind in ("forward", "step")}}
    for name, cost in COST.items()
]
cells = [{"setting": {"length": 8, "embed_dim": 4}, "rows": rows}]
(pathlib.Path(folder) / "benchmark.json").write_text(json.dumps({"cells": cells}))
"""


def git(folder: Path, *words: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.org")
    command = ["git", "-C", str(folder), *identity, *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A checkout's package with the benchmark, committed under the tag ``first``."""
    folder = tmp_path / "checkout" / "src" / "kernel_attention"
    folder.mkdir(parents=True)
    git(folder, "init", "--quiet", str(tmp_path / "checkout"))
    (tmp_path / "checkout" / ".gitignore").write_text("__pycache__/\n")
    (folder / "__init__.py").write_text("")
    (folder / "__main__.py").write_text(BENCH)
    git(folder, "add", str(tmp_path / "checkout"))
    git(folder, "commit", "--quiet", "-m", "first")
    git(folder, "tag", "first")
    return folder


def change(package: Path, old: str, new: str) -> None:
    main = package / "__main__.py"
    assert old in main.read_text()
    assert len(old) != len(new)  # of a file of one size and second Python takes the compiled one for new
    main.write_text(main.read_text().replace(old, new))


def verdicts(record: dict) -> dict[tuple[str, str], str]:
    return {(row["contender"], row["pass"]): row["verdict"] for row in record["rows"]}


def test_what_got_slower_and_what_got_faster_is_named_and_nothing_else(package):
    change(package, '"linear": 1.0}', '"linear": 1.3, "new": 1.0}')  # not committed
    record = measure_against("first", ["dense"], package=package)
    assert verdicts(record) == {
        ("dense", "forward"): "", ("dense", "step"): "",
        ("linear", "forward"): "slower", ("linear", "step"): "slower",
    }  # fmt: skip
    assert record["lacking"] == {"old": ["new"], "new": []}
    row = next(row for row in record["rows"] if row["contender"] == "linear")
    # Two factors of at most 2 % on either side; the speeds of the machine cancel.
    assert 1.3 * 0.98 / 1.02 <= row["ratio_lower"] <= row["ratio"] <= row["ratio_upper"] <= 1.3 * 1.02 / 0.98
    git(package, "commit", "--quiet", "--all", "-m", "second")
    git(package, "checkout", "--quiet", "-b", "other", "first")
    back = measure_against("HEAD@{1}", [], package=package)
    assert verdicts(back)["linear", "step"] == "faster"
    assert back["commit"] == git(package, "rev-parse", "HEAD@{1}").strip()


def test_differences_below_the_least_change_are_not_reported(package):
    change(package, '"linear": 1.0}', '"linear": 1.02}')
    change(package, "uniform(0.98, 1.02)", "uniform(1.0, 1.0)")
    git(package, "commit", "--quiet", "--all", "-m", "second")
    change(package, '"linear": 1.02}', '"linear": 1.040}')
    (row,) = {row["ratio"]: row for row in measure_against("HEAD", [], package=package)["rows"]
              if row["contender"] == "linear"}.values()  # fmt: skip
    assert row["chance"] < 0.01
    assert row["verdict"] == ""


@pytest.mark.parametrize("reference", ["no-such-revision", "--quiet", "HEAD:src"])
def test_an_unknown_revision_is_refused(package, reference):
    with pytest.raises(InputError, match="git knows no such revision"):
        measure_against(reference, [], package=package)


def test_a_package_that_no_checkout_tracks_is_refused(package, tmp_path):
    alone = tmp_path / "site-packages" / "kernel_attention"
    installed = package.parents[1] / ".venv" / "kernel_attention"  # inside the checkout, and not of it
    for copy in (alone, installed):
        shutil.copytree(package, copy)
        with pytest.raises(InputError, match="needs a git checkout of this project"):
            measure_against("HEAD", [], package=copy)


def test_too_few_rounds_are_refused(package):
    with pytest.raises(InputError, match=f"rounds=6 must be at least {LEAST_ROUNDS}"):
        measure_against("HEAD", [], package=package, rounds=6)


def test_a_revision_without_the_package_is_refused(package):
    git(package.parents[1], "mv", "src", "source")
    git(package.parents[1], "commit", "--quiet", "-m", "moved")
    moved = package.parents[1] / "source" / "kernel_attention"
    with pytest.raises(InputError, match="has no kernel_attention in src"):
        measure_against("HEAD", [], package=moved)


@pytest.mark.parametrize(
    ("body", "error", "said"),
    [
        ("import sys; print('error: unknown suite', file=sys.stderr); sys.exit(2)", InputError,
         "first cannot measure this: unknown suite"),
        ("raise SystemExit('out of memory')", BenchmarkFailedError, "exit code 1: out of memory"),
    ],
)  # fmt: skip
def test_a_revision_that_cannot_measure_ends_with_its_own_words(package, body, error, said):
    good = (package / "__main__.py").read_text()
    (package / "__main__.py").write_text(body)
    git(package, "commit", "--quiet", "--all", "--amend", "-m", "first")
    git(package, "tag", "--force", "first")
    (package / "__main__.py").write_text(good)
    with pytest.raises(error, match=said):
        measure_against("first", [], package=package)
    assert len(git(package, "worktree", "list").splitlines()) == 1


def test_the_exit_code_says_whether_something_got_slower(package, monkeypatch, tmp_path, capsys):
    from kernel_attention_lab.cli import main

    monkeypatch.setattr(revisions, "_PACKAGE", package)
    monkeypatch.chdir(tmp_path)
    command = ["bench", "sdpa", "--length", "8", "--against", "first", "--output", "out"]
    assert main(command) == 0
    assert "slower: nothing beyond the noise" in capsys.readouterr().out
    change(package, '"linear": 1.0}', '"linear": 1.30}')
    assert main(command) == 1
    out = capsys.readouterr().out
    assert "slower: linear, forward, N 8, d 4: 1." in out
    assert "written: out/against.json, out/against.md" in out
    assert "| linear | N 8, d 4 | step |" in (tmp_path / "out/against.md").read_text()


@pytest.mark.slow  # fourteen processes that import torch
def test_this_checkout_against_its_last_commit():
    try:
        record = measure_against(
            "HEAD", ["linear", "--length", "8", "--embed_dim", "8", "--threads", "1"], rounds=LEAST_ROUNDS
        )
    except InputError as error:
        pytest.skip(str(error))  # a source archive
    assert {row["contender"] for row in record["rows"]} == {"sdpa", "linear"}


def test_the_joint_sign_flip_test_of_one_quantity_counts_all_flips():
    values = np.random.default_rng(0).normal(0.5, 1.0, size=(9, 1))
    flipped = [np.dot(signs, values[:, 0]) for signs in itertools.product((-1, 1), repeat=9)]
    expected = np.mean(np.array(flipped) >= values.sum() - 1e-12)
    assert joint_sign_flip_test(values) == pytest.approx([expected])
    assert joint_sign_flip_test(np.ones((9, 1))) == pytest.approx([2**-9])


def test_the_joint_sign_flip_test_gives_the_alarm_that_its_level_allows():
    # Forty quantities that share the moods of a round: the chance of any alarm, not of each.
    generator = np.random.default_rng(0)
    alarms = 0
    for _ in range(1000):
        rounds = generator.normal(size=(8, 1)) + generator.standard_cauchy(size=(8, 40))
        alarms += bool((joint_sign_flip_test(rounds) <= 0.05).any())
    assert alarms <= 50 + 3 * (1000 * 0.05 * 0.95) ** 0.5


def test_the_joint_sign_flip_test_finds_the_one_that_differs():
    generator = np.random.default_rng(0)
    rounds = generator.normal(scale=[0.02] * 30 + [5.0], size=(11, 31))
    rounds[:, 7] += 0.1
    found = joint_sign_flip_test(rounds)
    assert found[7] <= 0.01
    assert (np.delete(found, 7) > 0.01).all()
    drawn = joint_sign_flip_test(np.concatenate([rounds, rounds]), draws=1000)  # of 2^22 flips
    assert drawn[7] <= 0.01


@pytest.mark.parametrize("values", [np.ones(3), np.ones((0, 2)), np.array([[1.0, np.nan]])], ids=str)
def test_the_joint_sign_flip_test_refuses_what_is_no_table(values):
    with pytest.raises(InputError, match="differences of shape"):
        joint_sign_flip_test(values)
