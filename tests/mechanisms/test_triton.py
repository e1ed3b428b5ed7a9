"""Triton kernels, in every family that has them, are as near to float64 as the formulas in that precision."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from triton_process import (
    check,
    check_operator_in_interpreter,
    check_operator_on_gpu,
    errors_in_interpreter,
    errors_on_gpu,
)

import kernel_attention as ka


class Cases(NamedTuple):
    """How many cases the family's ``triton_worker.py`` has."""

    in_interpreter: int
    on_gpu: int


FAMILIES = {"kernel_pca": Cases(9, 26), "linear": Cases(6, 16), "primal": Cases(14, 30)}


def worker(family: str, name: str) -> Path:
    return Path(__file__).parent / family / name


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_equal_the_formulas_in_tritons_interpreter(family):
    found = errors_in_interpreter(worker(family, "triton_worker.py"))
    assert len(found) == FAMILIES[family].in_interpreter
    check(found)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_the_kernels_equal_the_formulas_on_a_gpu(family):
    found = errors_on_gpu(worker(family, "triton_worker.py"))
    assert len(found) == FAMILIES[family].on_gpu
    check(found)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_the_operator_is_what_it_tells_the_compiler_in_tritons_interpreter(family):
    check_operator_in_interpreter(worker(family, "triton_operator_worker.py"))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_the_operator_is_what_it_tells_the_compiler_on_a_gpu(family):
    check_operator_on_gpu(worker(family, "triton_operator_worker.py"))


@pytest.mark.parametrize("name", ["linear", "primal", "rpc"])
def test_an_unknown_impl_is_refused(name):
    with pytest.raises(ka.InputError, match="impl"):
        ka.create_attention(name, 8, 2, impl="cuda")
