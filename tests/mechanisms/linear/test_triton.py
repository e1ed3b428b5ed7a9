"""The Triton kernels are as near to float64 as the formulas are in the same precision."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import (
    check,
    check_operator_in_interpreter,
    check_operator_on_gpu,
    errors_in_interpreter,
    errors_on_gpu,
)

import kernel_attention as ka

WORKER = Path(__file__).parent / "triton_worker.py"
OPERATOR_WORKER = Path(__file__).parent / "triton_operator_worker.py"


def test_the_kernels_equal_the_formulas_in_tritons_interpreter():
    found = errors_in_interpreter(WORKER)
    assert len(found) == 6
    check(found)


@pytest.mark.gpu
def test_the_kernels_equal_the_formulas_on_a_gpu():
    found = errors_on_gpu(WORKER)
    assert len(found) == 16
    check(found)


def test_the_operator_is_what_it_tells_the_compiler_in_tritons_interpreter():
    check_operator_in_interpreter(OPERATOR_WORKER)


@pytest.mark.gpu
def test_the_operator_is_what_it_tells_the_compiler_on_a_gpu():
    check_operator_on_gpu(OPERATOR_WORKER)


def test_an_unknown_impl_is_refused():
    with pytest.raises(ka.InputError, match="impl"):
        ka.create_attention("linear", 8, 2, impl="cuda")
