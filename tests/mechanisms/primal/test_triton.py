"""The Triton kernels are as near to float64 as the formulas are in the same precision."""

from __future__ import annotations

from pathlib import Path

import pytest
from triton_process import check, errors_in_interpreter, errors_on_gpu

WORKER = Path(__file__).parent / "triton_worker.py"


def test_the_kernels_equal_the_formulas_in_tritons_interpreter():
    found = errors_in_interpreter(WORKER)
    assert len(found) == 20  # five layers, two precisions, with and without padding
    check(found)


@pytest.mark.gpu
def test_the_kernels_equal_the_formulas_on_a_gpu():
    found = errors_on_gpu(WORKER)
    assert len(found) == 30
    check(found)
