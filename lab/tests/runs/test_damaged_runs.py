"""Damaged run folders: every command ends with its contract's exit code and one line, and loses nothing."""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
import signal
import stat
import traceback
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from runs.damage import damage
from runs.small_runs import CHANNELS, make_waves, write_recipe
from tasks.text_data import LANGUAGE, sentences
from tasks.token_data import TOKENS, make_tokens

from kernel_attention.training.task import TrainingTask
from kernel_attention_lab.cli import main
from kernel_attention_lab.reporting.records import read_run
from kernel_attention_lab.runs import analyze, run

TASKS = ("time series", "tokens", "language")
CASES = 600  # of every task and state
SECONDS = 60  # for a case that takes hundredths of one


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = make_tokens(make_waves(tmp_path_factory.mktemp("data")))
    (root / "fables").mkdir()
    for seed, (name, count) in enumerate([("train", 60), ("valid", 12), ("test", 13)]):
        (root / "fables" / f"{name}.txt").write_text(sentences(count, seed))
    np.save(root / "x.npy", np.zeros((2, CHANNELS, 4)))
    (root / "lines.txt").write_text("the film is fine\na dull plot\n")
    return root


def recipe_of(task: str, path: Path) -> Path:
    if task == "time series":
        return write_recipe(path)
    changes = {"steps": 6, "evaluate_every": 3}
    recipe = TOKENS | {"dataset": "sst2"} if task == "tokens" else LANGUAGE
    path.write_text(yaml.safe_dump(recipe | changes, sort_keys=False))
    return path


@pytest.fixture(scope="module", params=[(task, state) for task in TASKS for state in ("finished", "stopped")])
def healthy(request, data, tmp_path_factory):
    """A run folder, finished or stopped by Ctrl-C inside its second round."""
    task, state = request.param
    work = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run, "write_report", brief_report)
        steps, objective = 0, TrainingTask.objective

        def stop(self, loss, batch, objectives):
            nonlocal steps
            steps += 1
            if state == "stopped" and steps == 5:
                os.kill(os.getpid(), signal.SIGINT)
            return objective(self, loss, batch, objectives)

        patched.setattr(TrainingTask, "objective", stop)
        arguments = ["train", str(recipe_of(task, work / "run.yaml")), "--output", str(work / "run")]
        code = main([*arguments, "--data-root", str(data), "--progress", "false"])
    assert code == (state == "stopped")
    return task, state, work / "run"


def brief_report(folder: Path) -> None:
    """All that a report reads, and none of the pictures that take seconds."""
    read_run(folder)
    (folder / "report.html").write_text("<html>")


def commands(task: str, folder: Path, data: Path) -> list[list[str]]:
    """All that open a run of this task; twice as often what also writes into it."""
    root = ["--data-root", str(data)]
    resume = ["train", "--resume", str(folder), "--progress", "false"]
    found = [resume, [*resume, *root], ["evaluate", str(folder), *root], ["evaluate", str(folder)]]
    if task == "language":
        text = str(data / "lines.txt")
        generate = ["generate", str(folder), "--prompt", "the cat", "--tokens", "3"]
        return [*found, ["evaluate", str(folder), text], generate]
    found += [["analyze", str(folder), "--cases", "2", *root], ["analyze", str(folder), "--cases", "2"]]
    if task == "tokens":
        return [*found, ["predict", str(folder), str(data / "lines.txt")]]
    labelled, plain = str(data / "Waves/Waves_TEST.ts"), str(data / "x.npy")
    return [*found, ["evaluate", str(folder), labelled], ["predict", str(folder), plain]]


def snapshot(folder: Path) -> dict[str, object]:
    """What every name in a folder is; the content of files, the target of links."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            found[str(path.relative_to(folder))] = os.readlink(path)
        else:
            found[str(path.relative_to(folder))] = (
                path.read_bytes() if stat.S_ISREG(mode) else stat.S_IFMT(mode)
            )
    return found


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def expire(*arguments: object) -> None:
        raise TimeoutError(f"still running after {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def complaint(arguments: list[str], folder: Path) -> str | None:
    """What is wrong with how a command took a damaged folder; None where it kept its contract."""
    before, out, err = snapshot(folder), io.StringIO(), io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), time_limit(SECONDS):
            code = main(arguments)
    except BaseException:
        return traceback.format_exc()
    finally:
        torch.set_num_threads(1)
    said, after = err.getvalue(), snapshot(folder)
    if "Traceback" in said + out.getvalue() or "details: " in said:
        details = folder / "error.txt"
        return f"unexpected: {said}{details.read_text() if details.is_file() else ''}"
    if code == 2 and not (said.startswith("error: ") and said.count("\n") == 1 and len(said) < 2000):
        return f"exit code 2 with {said[:3000]!r}"
    if code == 1 and not said.startswith("failed: "):
        return f"exit code 1 with {said!r}"
    if code not in (0, 1, 2):
        return f"exit code {code}"
    if code == 2 and before != after:
        return (
            f"exit code 2, and changed {[n for n in before | after if before.get(n) != after.get(n)]}: {said}"
        )
    left = [name for name in after if name.endswith((".tmp", ".lock")) and name not in before]
    lost = [name for name in before if name not in after and name != "error.txt"]
    return f"left behind {left}, lost {lost}" if left or lost else None


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_damage_ends_in_one_line_and_loses_nothing(healthy, data, tmp_path, monkeypatch):
    task, state, whole = healthy
    monkeypatch.setattr(run, "write_report", brief_report)
    monkeypatch.setattr(analyze, "write_report", brief_report)
    monkeypatch.chdir(tmp_path)
    chance = random.Random(f"{task} {state}")
    failures = []
    for case in range(int(os.environ.get("DAMAGE_CASES", CASES))):
        folder = tmp_path / "run"
        shutil.copytree(whole, folder)
        done = damage(folder, chance)
        arguments = chance.choice(commands(task, folder, data))
        wrong = complaint(arguments, folder)
        if wrong is not None:
            failures.append(f"case {case}: {done}: {' '.join(arguments[:2])}: {wrong}")
        shutil.rmtree(folder)
    assert not failures, f"{len(failures)} of {case + 1}\n" + "\n".join(failures[:20])
