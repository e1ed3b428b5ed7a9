"""Runs that fail: what is said, what is kept, and how they go on."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import shlex
import signal

import pytest
from runs.small_runs import assert_same_outcome, train_small, write_recipe

from kernel_attention.series.task import SequenceTask
from kernel_attention.training.loop import Interrupted
from kernel_attention_lab.cli import main
from kernel_attention_lab.reporting import report
from kernel_attention_lab.run_folder import read_json
from kernel_attention_lab.runs import recorder, run
from kernel_attention_lab.tasks import time_series

pytestmark = pytest.mark.usefixtures("brief")


@pytest.fixture
def arguments(waves, tmp_path):
    """Of a training run of two seeds in ``tmp_path / run``."""
    recipe = write_recipe(tmp_path / "run.yaml")
    return [
        "train", str(recipe), "--output", str(tmp_path / "run"), "--data-root", str(waves),
        "--progress", "false", "--seeds", "0", "1",
    ]  # fmt: skip


def command_of(err: str) -> list[str]:
    """The arguments of the command that a failed run says to go on with."""
    (line,) = [line for line in err.splitlines() if line.startswith("resume: ")]
    words = shlex.split(line.removeprefix("resume: "))
    assert words[0] == "kernel-attention"
    return [*words[1:], "--progress", "false"]


def interrupt(*arguments, **options):
    """Ctrl-C, here and now."""
    os.kill(os.getpid(), signal.SIGINT)


def failing(original, at, act):
    """``original``, which acts instead at its ``at``-th call."""
    calls = 0

    @functools.wraps(original)  # Lightning looks at the arguments of a step
    def wrapper(*arguments, **options):
        nonlocal calls
        calls += 1
        if calls == at:
            act()
        return original(*arguments, **options)

    return wrapper


@pytest.mark.parametrize(
    ("owner", "name", "at"),
    [
        (SequenceTask, "validation_step", 2),
        (recorder, "write_csv", 2),
        (time_series, "evaluate_split", 1),
        (time_series, "kernel_spectra", 2),
        (run, "write_report", 1),
    ],
)
def test_ctrl_c_saves_and_says_how_to_go_on(
    owner, name, at, arguments, trained, tmp_path, monkeypatch, capsys
):
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patched:
        patched.setattr(owner, name, failing(getattr(owner, name), at, interrupt))
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("interrupted\nsaved: ")
    assert "Traceback" not in err
    assert signal.getsignal(signal.SIGINT) is handler, "Ctrl-C works again"
    assert main(command_of(err)) == 0
    assert_same_outcome(tmp_path / "run", trained)


def test_ctrl_c_after_every_step(arguments, trained, tmp_path, monkeypatch, capsys):
    """One step each time, from the first to the last of both seeds, at the ends of epochs too."""
    command, stops = arguments, 0
    while True:
        with monkeypatch.context() as patched:
            patched.setattr(SequenceTask, "training_step", failing(SequenceTask.training_step, 1, interrupt))
            code = main(command)
        if code == 0:
            break
        err, stops = capsys.readouterr().err, stops + 1
        finished = "seed 0: finished; seed 1: " if stops > 9 else "seed 0: "
        step = (stops - 1) % 9 + 1
        assert err.startswith(
            f"interrupted\nsaved: {tmp_path / 'run'} ({finished}checkpoint after step {step})\n"
        )
        command = command_of(err)
    assert stops == 2 * 3 * 3
    assert_same_outcome(tmp_path / "run", trained)


def test_a_second_ctrl_c_stops_at_once(arguments, trained, tmp_path, monkeypatch, capsys):
    def twice():
        interrupt()
        interrupt()

    with monkeypatch.context() as patched:
        patched.setattr(SequenceTask, "training_step", failing(SequenceTask.training_step, 5, twice))
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert "seed 0: checkpoint after step 3)" in err, "that of the last whole epoch"
    assert main(command_of(err)) == 0
    assert_same_outcome(tmp_path / "run", trained)


def test_what_is_saved_before_the_first_step_and_after_the_first_seed(
    arguments, tmp_path, monkeypatch, capsys
):
    def twice():
        interrupt()
        interrupt()

    run_folder = tmp_path / "run"
    with monkeypatch.context() as patched:
        patched.setattr(SequenceTask, "training_step", failing(SequenceTask.training_step, 1, twice))
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert f"saved: {run_folder} (seed 0: checkpoint of step 0, nothing trained yet)\n" in err
    with monkeypatch.context() as patched:
        patched.setattr(SequenceTask, "training_step", failing(SequenceTask.training_step, 11, interrupt))
        assert main(command_of(err)) == 1
    err = capsys.readouterr().err
    assert f"saved: {run_folder} (seed 0: finished; seed 1: checkpoint after step 2)\n" in err


def test_ctrl_c_before_the_run_began(arguments, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(time_series, "load_time_series", interrupt)
    assert main(arguments) == 1
    assert capsys.readouterr().err == "interrupted\nnothing is saved: the run had not begun\n"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_in_another_command(trained, waves, monkeypatch, capsys):
    monkeypatch.setattr(time_series, "predict_outputs", interrupt)
    assert main(["evaluate", str(trained), "--data-root", str(waves)]) == 1
    assert capsys.readouterr().err == "interrupted\n"


def test_interrupted_is_no_exception_that_a_search_would_swallow():
    assert issubclass(Interrupted, KeyboardInterrupt)
    assert not issubclass(Interrupted, Exception)


def test_a_loss_that_is_no_number(arguments, tmp_path, capsys):
    assert main([*arguments, "--learning-rate", "1e30", "--gradient-clip", "0"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("failed: FloatingPointError: ")
    assert " in epoch " in err
    assert f"saved: {tmp_path / 'run'}" in err
    assert "resume: " not in err, "it would fail again"
    assert "--learning_rate" in err
    assert "Traceback" not in err
    rows = tmp_path / "run/seed-0/metrics.json"
    assert not rows.exists() or "NaN" not in rows.read_text()


@contextlib.contextmanager
def limited_disk(size: int):
    """No file may grow beyond ``size`` bytes; root is held to it too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_during_training(arguments, trained, tmp_path, capsys):
    """The checkpoint does not fit: the run fails, leaves nothing half-written, and goes on given room."""
    with limited_disk(4000):
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("failed: ")
    assert f"saved: {tmp_path / 'run'} (its recipe, no checkpoint yet)\n" in err
    assert "Traceback" not in err
    assert [path.name for path in (tmp_path / "run/seed-0").iterdir()] == []
    assert main(command_of(err)) == 0
    assert_same_outcome(tmp_path / "run", trained)


def test_a_full_disk_at_the_report(arguments, trained, tmp_path, monkeypatch, capsys):
    """All is saved but the page: no bad input, and a resumed run writes the page."""
    monkeypatch.setattr(run, "write_report", report.write_report)
    monkeypatch.setattr(report, "render", lambda run: "x" * (largest + 2000))
    largest = max(path.stat().st_size for path in trained.rglob("*") if path.name != "report.html")
    with limited_disk(largest + 1000):
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"failed: OSError: report '{tmp_path / 'run' / 'report.html'}': cannot be written")
    assert f"saved: {tmp_path / 'run'} (seed 0: finished; seed 1: finished)\n" in err
    assert not (tmp_path / "run/error.txt").exists()
    assert main(command_of(err)) == 0
    assert (tmp_path / "run/report.html").stat().st_size > largest + 1000


def test_a_full_disk_before_training(arguments, tmp_path, capsys):
    with limited_disk(10):
        assert main(arguments) == 2
    assert capsys.readouterr().err.startswith(f"error: output {tmp_path / 'run'}: cannot be written (")
    assert not (tmp_path / "run").exists()


def test_an_unexpected_error_is_written_down(arguments, trained, tmp_path, monkeypatch, capsys):
    def broken():
        raise KeyError("no such thing")

    with monkeypatch.context() as patched:
        patched.setattr(SequenceTask, "training_step", failing(SequenceTask.training_step, 8, broken))
        assert main(arguments) == 1
    err = capsys.readouterr().err
    assert err.startswith("failed: KeyError: 'no such thing'\n")
    details = (tmp_path / "run/error.txt").read_text()
    assert "Traceback" in details
    assert "no such thing" in details
    assert main(command_of(err)) == 0
    assert_same_outcome(tmp_path / "run", trained)


def test_a_run_stopped_before_it_began_begins_anew(arguments, trained, tmp_path):
    """Killed while ``config.yaml`` was written: there is nothing to resume, and nothing in the way."""
    folder = tmp_path / "run"
    folder.mkdir()
    for name in (".config.yaml.123.tmp", "versions.json", "data.json", ".data.json.99.tmp"):
        (folder / name).write_text("{")
    assert main(["train", "--resume", str(folder)]) == 2
    assert main(arguments) == 0
    assert_same_outcome(folder, trained)


def test_a_resumed_run_keeps_its_name(arguments, tmp_path, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(run, "write_report", interrupt)
        assert main(arguments) == 1
    moved = (tmp_path / "run").rename(tmp_path / "elsewhere")
    assert main(["train", "--resume", str(moved), "--data-root", arguments[5], "--progress", "false"]) == 0
    assert read_json(moved / "summary.json")["recipe"] == "run"


def test_a_failed_test_figure_is_a_failure(waves, tmp_path, monkeypatch, capsys):
    evaluate = time_series.evaluate_split

    def overflow(*arguments):
        return evaluate(*arguments) | {"loss": float("inf")}

    monkeypatch.setattr(time_series, "evaluate_split", overflow)
    with pytest.raises(AssertionError):
        train_small(tmp_path / "run", waves, epochs=1)
    assert "FloatingPointError: the loss on the test split is inf" in capsys.readouterr().err
    assert not (tmp_path / "run/seed-0/evaluation.json").exists()
