"""The Triton kernels are as near to float64 as the formulas are in the same precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_process import check, errors_in_interpreter, errors_on_gpu

import kernel_attention as ka

WORKER = Path(__file__).parent / "triton_worker.py"


def test_the_kernels_equal_the_formulas_in_tritons_interpreter():
    found = errors_in_interpreter(WORKER)
    assert len(found) == 13
    check(found)


@pytest.mark.gpu
def test_the_kernels_equal_the_formulas_on_a_gpu():
    found = errors_on_gpu(WORKER)
    assert len(found) == 26
    check(found)


def test_an_unknown_impl_is_refused():
    with pytest.raises(ka.InputError, match="impl"):
        ka.create_attention("rpc", 8, 2, impl="cuda")


def test_the_kernels_have_no_dropout():
    layer = ka.create_attention("rpc", 8, 2, impl="triton", dropout=0.1)
    with pytest.raises(ka.InputError, match="impl='triton' has no dropout"):
        layer(torch.randn(1, 3, 8))
