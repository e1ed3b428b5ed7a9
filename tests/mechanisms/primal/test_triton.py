"""The Triton kernels are as near to float64 as the formulas are in the same precision."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
HOSTS = Path(sys.prefix) / "hosts"  # where `make env` puts what does not live well beside a CPU torch


def errors(device: str, **environment: str) -> dict[str, dict[str, list[float]]]:
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HOSTS)])
    worker = subprocess.run(
        [sys.executable, str(HERE / "triton_worker.py"), device],
        env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "No module named 'triton'" in worker.stderr:
        pytest.skip("triton is not installed")
    assert worker.returncode == 0, worker.stderr
    return json.loads(worker.stdout.splitlines()[-1])


def check(found: dict[str, dict[str, list[float]]]) -> None:
    for case, quantities in found.items():
        dtype = getattr(torch, case.split("-")[-2])
        for name, (kernel, formula) in quantities.items():
            assert kernel < 2 * formula + 4 * torch.finfo(dtype).eps, (case, name, kernel, formula)


def test_the_kernels_equal_the_formulas_in_tritons_interpreter():
    found = errors("cpu", TRITON_INTERPRET="1")
    assert len(found) == 20  # five layers, two precisions, with and without padding
    check(found)


@pytest.mark.gpu
def test_the_kernels_equal_the_formulas_on_a_gpu():
    found = errors("cuda")
    assert len(found) == 30
    check(found)
