"""Triton's kernels are compared with the formulas in a process of their own.

Triton reads TRITON_INTERPRET when it is imported, so a test cannot set it for itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HOSTS = Path(sys.prefix) / "hosts"  # where `make env` puts what does not live well beside a CPU torch

Errors = dict[str, dict[str, list[float]]]  # case -> quantity -> errors of the kernels and of the formulas


def errors_in_interpreter(worker: Path) -> Errors:
    return _errors(worker, "cpu", TRITON_INTERPRET="1")


def errors_on_gpu(worker: Path) -> Errors:
    _require_gpu()
    return _errors(worker, "cuda")


def check_operator_in_interpreter(worker: Path) -> None:
    """What compilers are told of an operator is true, and a compiled layer has its numbers."""
    assert _said(worker, "cpu", TRITON_INTERPRET="1") == "equal"


def check_operator_on_gpu(worker: Path) -> None:
    """As ``check_operator_in_interpreter``, on a GPU."""
    _require_gpu()
    assert _said(worker, "cuda") == "equal"


def _require_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def _errors(worker: Path, device: str, **environment: str) -> Errors:
    return json.loads(_said(worker, device, **environment))


def _said(worker: Path, device: str, **environment: str) -> str:
    """The last line that a worker prints."""
    folders = [str(Path(__file__).parent), str(HOSTS)]  # of ``triton_outcomes``, and of Triton
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), *folders])
    done = subprocess.run(
        [sys.executable, str(worker), device],
        env=os.environ | {"PYTHONPATH": path} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if "No module named 'triton'" in done.stderr:
        pytest.skip("triton is not installed")
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def check(found: Errors) -> None:
    """The kernels are as near to float64 as the formulas are in the same precision.

    Both errors of a quantity are single draws of rounding. So the kernels' error is held against the largest
    that the formulas have in the case: one lucky draw of theirs would fail kernels that are right.
    """
    for case, quantities in found.items():
        eps = torch.finfo(getattr(torch, case.split("-")[-2])).eps
        allowed = 4 * max(formula for _, formula in quantities.values()) + 4 * eps
        for name, (kernel, formula) in quantities.items():
            assert kernel < allowed, (case, name, kernel, formula, allowed)
