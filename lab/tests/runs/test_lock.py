"""One process at a time trains into a folder; whoever comes second is told who is there."""

from __future__ import annotations

import errno
import os
import re
import signal
import subprocess
import time

import pytest
from runs.small_runs import SRC, assert_same_outcome, launch, write_recipe

from kernel_attention.errors import InputError
from kernel_attention_lab.cli import main
from kernel_attention_lab.lock import LOCK_NAME, locked


def holder(folder) -> subprocess.Popen:
    """A process that holds the folder until it is killed."""
    script = (
        "import sys, time; from pathlib import Path\n"
        "from kernel_attention_lab.lock import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); time.sleep(600)"
    )
    process = subprocess.Popen(
        [os.sys.executable, "-c", script, str(folder)],
        env=os.environ | {"PYTHONPATH": str(SRC)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_is_refused_and_told_who_is_there(tmp_path):
    process = holder(tmp_path)
    try:
        for _ in range(2):  # being refused takes nothing from the holder
            with (
                pytest.raises(InputError, match=f"process {process.pid} on .* is writing into it"),
                locked(tmp_path),
            ):
                pytest.fail("two hold one folder")
    finally:
        process.kill()
        process.communicate()
    with locked(tmp_path):
        assert str(os.getpid()) in (tmp_path / LOCK_NAME).read_text(), "a killed holder holds nothing"
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.name == "nt", reason="the lock is taken by hand, with fcntl")
def test_a_holder_that_has_not_named_itself_yet_is_another_process(tmp_path):
    import fcntl

    with (tmp_path / LOCK_NAME).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(InputError, match=": another process is writing into it"), locked(tmp_path):
            pytest.fail("two hold one folder")


@pytest.mark.skipif(os.name == "nt", reason="the file system's answer is made with fcntl")
def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch, caplog):
    import fcntl

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with locked(tmp_path), locked(tmp_path):
        pass
    assert "start no second process in it" in caplog.text
    assert not list(tmp_path.iterdir())


def test_a_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(KeyError), locked(tmp_path):
        raise KeyError
    with locked(tmp_path):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_two_processes_begin_one_run_at_once(waves, trained, tmp_path):
    """Exactly one trains; what it leaves is what it would have left alone."""
    recipe, folder = write_recipe(tmp_path / "run.yaml", epochs=3), tmp_path / "run"
    options = ("--output", folder, "--data-root", waves, "--progress", "false", "--seeds", "0", "1")
    processes = [launch("train", recipe, *options) for _ in range(2)]
    said = {process.pid: process.communicate(timeout=300)[1] for process in processes}
    codes = {process.pid: process.returncode for process in processes}
    assert sorted(codes.values()) == [0, 2], said
    winner, loser = sorted(codes, key=codes.get)
    accepted = rf"error: (run .*: process {winner} on .* is writing into it|output .* is not empty).*\n"
    assert re.fullmatch(accepted, said[loser]), said[loser]
    assert_same_outcome(folder, trained)


@pytest.mark.slow
def test_resuming_what_another_process_trains(waves, tmp_path, capsys):
    recipe, folder = write_recipe(tmp_path / "run.yaml", epochs=10**6), tmp_path / "run"
    process = launch("train", recipe, "--output", folder, "--data-root", waves, "--progress", "false")
    try:
        while not (folder / "seed-0/last.ckpt").exists():
            assert process.poll() is None, process.communicate()[1]
            time.sleep(0.01)
        assert main(["train", "--resume", str(folder), "--progress", "false"]) == 2
        err = capsys.readouterr().err
        assert f"process {process.pid} on " in err
        assert err.count("\n") == 1
        process.send_signal(signal.SIGTERM)
        err = process.communicate(timeout=120)[1]
        assert process.returncode == 1
        assert err.startswith(f"interrupted\nsaved: {folder} (seed 0: checkpoint after step ")
    finally:
        process.kill()
        process.communicate()
    assert not (folder / LOCK_NAME).exists()
