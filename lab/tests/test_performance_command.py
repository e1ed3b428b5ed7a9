"""``make performance``: every measurement without a name, some by name, and none of uncommitted code."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "performance.py"


@pytest.fixture
def performance(monkeypatch):
    specification = importlib.util.spec_from_file_location("performance", SCRIPT)
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    measured = []
    monkeypatch.setattr(
        module, "measure_suite", lambda name, folder, path: measured.append((name, path.name))
    )
    monkeypatch.setattr(module, "measure_script", lambda name, path: measured.append((name, path.name)))
    monkeypatch.setattr(module, "code_revision", lambda: {"revision": "0123abc"})
    return module, measured


@pytest.mark.parametrize("names", [[], ["rpc", "decoding"]])
def test_all_or_the_named_are_measured(performance, names, monkeypatch):
    module, measured = performance
    monkeypatch.setattr(sys, "argv", ["performance.py", *names])
    module.main()
    names = names or [*module.SUITES, *module.SCRIPTS]
    assert measured == [(name, f"{name}.json") for name in names]


def test_a_second_machine_has_records_of_its_own(performance, monkeypatch):
    module, measured = performance
    monkeypatch.setattr(sys, "argv", ["performance.py", "rpc", "decoding", "--machine", "epyc"])
    module.main()
    assert measured == [("rpc", "rpc_epyc.json"), ("decoding", "decoding_epyc.json")]


def test_uncommitted_code_is_refused(performance, monkeypatch):
    module, measured = performance
    monkeypatch.setattr(sys, "argv", ["performance.py", "rpc"])
    monkeypatch.setattr(module, "code_revision", lambda: {"revision": "0123abc+"})
    with pytest.raises(SystemExit, match="uncommitted"):
        module.main()
    assert measured == []
