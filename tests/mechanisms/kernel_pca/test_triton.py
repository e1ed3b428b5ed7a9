"""RPC-Attention's Triton kernels are as near to float64 as the formulas; where they run, and where not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_attention as ka
from kernel_attention.tensors.gpu import float32_products

WORKER = Path(__file__).with_name("triton_worker.py")
HOSTS = Path(sys.prefix) / "hosts"  # where `make env` puts what does not live well beside a CPU torch
PLACES = [
    pytest.param("cpu", 3, id="interpreter"),
    pytest.param("cpu", 6, id="interpreter, all", marks=pytest.mark.slow),
    pytest.param("cuda", 23, id="gpu", marks=pytest.mark.gpu),
]
"""The device, and how many cases the worker has there."""


def said(task: str, device: str, cases: int) -> Any:
    """What the worker prints last."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    path = os.pathsep.join([*filter(None, [os.environ.get("PYTHONPATH")]), str(HOSTS)])
    environment = os.environ | {"PYTHONPATH": path} | ({"TRITON_INTERPRET": "1"} if device == "cpu" else {})
    done = subprocess.run(
        [sys.executable, str(WORKER), task, device, str(cases)], env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    if "No module named 'triton'" in done.stderr:
        pytest.skip("triton is not installed")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(("device", "cases"), PLACES)
def test_the_kernels_are_as_near_to_float64_as_the_formulas_in_that_precision(device, cases):
    found = said("kernels", device, cases)
    assert len(found) == cases
    for case, quantities in found.items():
        eps = torch.finfo(getattr(torch, case.split("-")[-2])).eps
        # Both errors are single draws of rounding: one lucky draw of the formulas would fail right kernels.
        allowed = 4 * max(formula for _, formula in quantities.values()) + 4 * eps
        for name, (kernel, formula) in quantities.items():
            assert kernel < allowed, (case, name, kernel, formula, allowed)


@pytest.mark.slow
@pytest.mark.parametrize(("device", "cases"), PLACES)
def test_the_operator_is_what_it_tells_the_compiler(device, cases):
    assert said("operator", device, cases) == "equal"


def test_the_kernels_have_no_dropout():
    layer = ka.create_attention("rpc", 8, 2, impl="triton", dropout=0.1)
    with pytest.raises(ka.InputError, match="impl='triton': the faster forms have no dropout"):
        layer(torch.randn(1, 3, 8))


@pytest.mark.parametrize(
    ("dtype", "length", "major", "options", "form"),
    [
        (torch.bfloat16, 1024, 9, {}, "triton"),
        (torch.float16, 4096, 9, {"iterations": 2}, "triton"),
        (torch.bfloat16, 1023, 9, {}, "reference"),
        (torch.float32, 4096, 9, {}, "reference"),
        (torch.bfloat16, 4096, 8, {}, "reference"),
        (torch.bfloat16, 4096, 9, {"dropout": 0.1}, "reference"),
        (torch.bfloat16, 4096, 9, {"impl": "reference"}, "reference"),
    ],
)
def test_the_kernels_run_by_themselves_where_they_were_measured_to_win(
    dtype, length, major, options, form, monkeypatch
):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (major, 0))
    monkeypatch.setattr("kernel_attention.tensors.gpu.has_triton", lambda: True)
    layer = ka.create_attention("rpc", 16, 2, **options)
    with FakeTensorMode():  # a device that is not there
        x = torch.empty(1, length, 16, dtype=dtype, device="cuda")
        assert layer.plan(x).engine == form
        assert layer.plan(x, is_causal=True).engine == "reference"
        assert layer.plan(x, compiled=True).engine == "reference"
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
        assert layer.plan(x).engine == "reference"


def test_heads_wider_than_measured_keep_the_formulas(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    layer = ka.create_attention("rpc", 256, 2)
    with FakeTensorMode():
        x = torch.empty(1, 4096, 256, dtype=torch.bfloat16, device="cuda")
        assert layer.plan(x)[:2] == (
            "reference", "the kernels were measured without is_causal, in heads up to 64 wide",
        )  # fmt: skip


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
def test_float32_products_are_those_that_pytorch_is_set_to(precision):
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision
    try:
        matmul.fp32_precision = precision
        assert float32_products() == precision
    finally:
        matmul.fp32_precision = before
