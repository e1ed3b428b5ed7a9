"""What long commands say on standard error while they work."""

from __future__ import annotations

import re

import pytest

from kernel_attention_lab.cli import progress as module
from kernel_attention_lab.cli.progress import progress


def test_without_a_terminal_every_line_has_its_time(capsys):
    with progress(seconds=0) as told:
        told("softmax, seed 0: training")
        told("softmax, seed 0: diagnosing")
    lines = capsys.readouterr().err.splitlines()
    assert [re.sub(r"^\d\d:\d\d:\d\d ", "", line) for line in lines] == [
        "softmax, seed 0: training",
        "softmax, seed 0: diagnosing",
    ]
    assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in lines)


def test_lines_that_follow_too_soon_are_left_out(capsys, monkeypatch):
    now = iter([100.0, 104.0, 111.0])
    monkeypatch.setattr(module.time, "monotonic", lambda: next(now))
    with progress(seconds=10) as told:
        for number in range(3):
            told(f"round {number}")
    assert [line.split(" ", 1)[1] for line in capsys.readouterr().err.splitlines()] == ["round 0", "round 2"]


@pytest.mark.parametrize("name", ["TTY_COMPATIBLE", "FORCE_COLOR"])
def test_on_a_terminal_one_line_is_rewritten(name, capsys, monkeypatch):
    monkeypatch.setenv(name, "1")
    with progress() as told:
        told("softmax, seed 0: training")
    err = capsys.readouterr().err
    assert "softmax, seed 0: training" in err
    assert not re.search(r"\d\d:\d\d:\d\d", err)
