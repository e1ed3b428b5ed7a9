"""Workers that submitit starts, here with its local executor."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from sweeping.sweeps import endings, small_sweep

from kernel_attention_lab.sweeping import join_sweep

submitit = pytest.importorskip("submitit")
SRC = os.pathsep.join(str(Path(__file__).parents[3] / place) for place in ("src", "lab/src"))


@pytest.mark.slow
def test_submitit_starts_a_worker(waves, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")]))
    folder = tmp_path / "sweep"
    small_sweep(folder, waves, ["learning_rate=0.001"])
    executor = submitit.LocalExecutor(folder=tmp_path / "logs")
    executor.update_parameters(timeout_min=20)
    job = executor.submit(join_sweep, str(folder), str(waves))
    job.result()
    assert endings(folder) == {0: 1}
