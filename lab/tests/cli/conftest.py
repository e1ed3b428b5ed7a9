"""The command line in this process, in an empty folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from runs.small_runs import brief, trained, trained_regression, waves  # noqa: F401

from kernel_attention_lab.cli import main


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder; the machine's Minari data sets are not listed."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(folder))
    return folder


@pytest.fixture
def cli(here: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command; (exit code, standard output, standard error)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        try:
            code = main([str(argument) for argument in arguments])
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def refused(here: Path, cli: Callable[..., tuple[int, str, str]]) -> Callable[..., str]:
    """Runs a command that must fail as bad input does, and leave nothing behind; the one line it says."""

    def run(*arguments: object) -> str:
        before = sorted(here.parent.rglob("*"))
        code, out, err = cli(*arguments)
        assert code == 2
        assert out == ""
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        assert err.endswith("\n")
        assert "Traceback" not in err
        assert sorted(here.parent.rglob("*")) == before, "nothing is left behind"
        return err.removeprefix("error: ").strip()

    return run
