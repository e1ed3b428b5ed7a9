"""Where RPC-Attention runs by its Triton kernels, and what it says where it does not."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import kernel_attention as ka
from kernel_attention.tensors.gpu import float32_products


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
        assert layer.plan(x).form == form
        assert layer.plan(x, is_causal=True).form == "reference"
        assert layer.plan(x, compiled=True).form == "reference"
        monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
        assert layer.plan(x).form == "reference"


def test_heads_wider_than_measured_keep_the_formulas(monkeypatch):
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))
    layer = ka.create_attention("rpc", 256, 2)
    with FakeTensorMode():
        x = torch.empty(1, 4096, 256, dtype=torch.bfloat16, device="cuda")
        assert layer.plan(x) == (
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
