"""Lists of data sets for a user without a home folder."""

from __future__ import annotations

import os

import pytest

from kernel_attention_lab.data.archive import list_time_series
from kernel_attention_lab.data.decisions.sets import list_decision_sets


@pytest.mark.skipif(os.name == "nt", reason="users have entries there")
def test_without_a_home_folder_the_lists_are_those_of_packages(monkeypatch):
    """As in a container with ``--user 12345``."""
    for name in ("HOME", "USERPROFILE", "XDG_CACHE_HOME", "MINARI_DATASETS_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}[number])
    assert list_decision_sets() == []
    assert {info.source for info in list_time_series()} <= {"aeon"}
