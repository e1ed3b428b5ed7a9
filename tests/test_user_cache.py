"""The folder of caches: that of the user, where there is one."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kernel_attention.errors import InputError
from kernel_attention.files import cache_folder, expand_home


@pytest.fixture
def _homeless(monkeypatch):
    """A user without an entry and without HOME, as in a container with ``--user 12345``."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "MINARI_DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])


def test_the_folder_of_the_environment_is_taken_where_it_is_absolute(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert cache_folder() == tmp_path / "cache/kernel-attention"
    for ignored in ("", "cache", "./cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder() == tmp_path / "home/.cache/kernel-attention"


@pytest.mark.skipif(os.name == "nt", reason="users have entries there")
@pytest.mark.usefixtures("_homeless")
def test_without_a_home_folder_the_message_says_what_to_set(monkeypatch, tmp_path):
    for call in (cache_folder, lambda: expand_home("~/data")):
        with pytest.raises(InputError, match="set the environment variable HOME"):
            call()
    assert expand_home(tmp_path) == tmp_path
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == Path(tmp_path, "kernel-attention")
