"""Writes that leave either the whole new file or the old one, whoever else writes it."""

from __future__ import annotations

import os
import stat
import threading

import pytest

from kernel_attention.files import is_unfinished, write_atomically, write_text_atomically


@pytest.mark.skipif(os.name == "nt", reason="Windows replaces no file that someone reads")
def test_writers_of_one_number_leave_whole_files(tmp_path):
    """Threads, as containers that share a folder, have one process number."""
    path = tmp_path / "report.html"
    whole = ("a" * 300_000, "b" * 200_000)
    path.write_text(whole[0])
    failed, torn, end = [], [], threading.Event()

    def write(text):
        for _ in range(20):
            try:
                write_text_atomically(path, text)
            except OSError as error:
                failed.append(error)

    def read():
        while not end.is_set():
            if (text := path.read_text()) not in whole:
                torn.append(len(text))

    reader = threading.Thread(target=read)
    writers = [threading.Thread(target=write, args=(text,)) for text in whole]
    reader.start()
    for thread in writers:
        thread.start()
    for thread in writers:
        thread.join()
    end.set()
    reader.join()
    assert (failed, torn) == ([], [])
    assert os.listdir(tmp_path) == ["report.html"]


def test_a_temporary_file_is_known_as_one_and_has_the_rights_of_any(tmp_path):
    names = []
    write_atomically(tmp_path / "a.json", lambda file: names.extend(tmp_path.iterdir()))
    assert [is_unfinished(name) for name in names] == [True]
    (tmp_path / "b").touch()
    assert stat.S_IMODE((tmp_path / "a.json").stat().st_mode) == stat.S_IMODE((tmp_path / "b").stat().st_mode)


def test_a_text_of_file_names_that_are_no_text_is_written(tmp_path):
    write_text_atomically(tmp_path / "a.csv", "caf\udce9,é")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == "caf\\udce9,é"


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    (tmp_path / "a").write_text("old")

    def fail(file):
        file.write(b"new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_atomically(tmp_path / "a", fail)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("a", "old")]
