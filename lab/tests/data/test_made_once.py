"""Data that several processes want at once are made by one of them."""

from __future__ import annotations

import threading
import time

import pytest

from kernel_attention.errors import InputError
from kernel_attention_lab.data.fetching import made_once


def test_who_comes_second_waits_and_makes_nothing(tmp_path, monkeypatch, caplog):
    """Threads take the lock as processes do: each opens the file."""
    path = tmp_path / "cache/data"
    waits = threading.Event()
    pause = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (waits.set(), pause(seconds)))
    made = []

    def make(name):
        if name == "first":
            second.start()
            assert waits.wait(60), "the second does not wait"
        made.append(name)
        path.write_text(name)

    def ask(name):
        return made_once(path, lambda: path.read_text() if path.exists() else None, lambda: make(name))

    found = []
    second = threading.Thread(target=lambda: found.append(ask("second")))
    assert ask("first") == "first"
    second.join()
    assert (made, found) == (["first"], ["first"])
    assert caplog.messages == [f"another process makes {path}; waiting for it"]
    assert list(path.parent.iterdir()) == [path]


def test_after_an_error_the_next_one_makes_it(tmp_path):
    path = tmp_path / "data"
    with pytest.raises(ZeroDivisionError):
        made_once(path, lambda: None, lambda: 1 / 0)
    with pytest.raises(InputError, match=r"cache .*data: is damaged as soon as it is written"):
        made_once(path, lambda: None, lambda: None)
    assert not list(tmp_path.iterdir())
