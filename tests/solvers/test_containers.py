"""Solvers read the containers that people have: a masked or missing value is refused, names are compared."""

import numpy as np
import pandas as pd
import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.solvers import (
    KernelPCAValues,
    KernelSVD,
    MultilinearSVD,
    PrincipalComponentPursuit,
    SupportVectorExpansion,
)

GENERATOR = np.random.default_rng(0)
A, B, Y = GENERATOR.standard_normal((12, 4)), GENERATOR.standard_normal((9, 4)), GENERATOR.standard_normal(12)
T = GENERATOR.standard_normal((3, 4, 5))

FITS = {
    "KernelSVD X": (A, lambda x: KernelSVD().fit(x, B)),
    "KernelSVD Z": (B, lambda z: KernelSVD().fit(A, z)),
    "KernelSVD primal Z": (B, lambda z: KernelSVD(solver="primal").fit(A, z)),
    "KernelSVD stochastic": (A, lambda x: KernelSVD(solver="primal_stochastic").partial_fit(x, B)),
    "KernelSVD stochastic Z": (B, lambda z: KernelSVD(solver="primal_stochastic").partial_fit(A, z)),
    "KernelSVD precomputed": (A, lambda x: KernelSVD(kernel="precomputed").fit(x)),
    "KernelSVD compatibility": (
        np.eye(4) + A[:4],
        lambda c: KernelSVD(solver="primal", compatibility=c).fit(A, B),
    ),
    "KernelSVD transform": (A, lambda x: KernelSVD(random_state=0).fit(A, B).transform(x)),
    "KernelSVD transform Z": (B, lambda z: KernelSVD(random_state=0).fit(A, B).transform(A, z)),
    "KernelPCAValues": (A, lambda x: KernelPCAValues().fit(x)),
    "KernelPCAValues transform": (A, lambda x: KernelPCAValues().fit(A).transform(x)),
    "SupportVectorExpansion X": (A, lambda x: SupportVectorExpansion().fit(x, Y)),
    "SupportVectorExpansion y": (Y, lambda y: SupportVectorExpansion().fit(A, y)),
    "SupportVectorExpansion predict": (A, lambda x: SupportVectorExpansion().fit(A, Y).predict(x)),
    "MultilinearSVD": (T, lambda x: MultilinearSVD().fit(x)),
    "MultilinearSVD transform": (T, lambda x: MultilinearSVD().fit(T).transform(x)),
    "MultilinearSVD sample": (A, lambda x: MultilinearSVD(kernel="features").fit([B, x])),
    "MultilinearSVD new sample": (
        A,
        lambda x: MultilinearSVD(kernel="features").fit([B, A]).transform([None, x]),
    ),
    "MultilinearSVD cubemax": (A[:5], lambda x: MultilinearSVD(kernel="cubemax").fit([B, B, x])),
}


def holed(array):
    """The array with one missing entry, in the marks that containers have for it."""
    mask = np.zeros(array.shape, dtype=bool)
    mask.flat[1] = True
    behind = np.where(mask, -9999.0, array)
    yield "masked", np.ma.masked_array(behind, mask)
    yield "masked float32", np.ma.masked_array(behind.astype(np.float32), mask)
    if array.ndim > 1:
        yield "list of masked rows", [np.ma.masked_array(*pair) for pair in zip(behind, mask, strict=True)]
    for mark in (None, pd.NA, np.nan):
        objects = array.astype(object)
        objects[mask] = mark
        yield f"objects with {mark}", objects
        yield f"lists with {mark}", objects.tolist()
        if array.ndim == 2:
            yield f"Float64 with {mark}", pd.DataFrame(objects).astype("Float64")
            yield f"frame of objects with {mark}", pd.DataFrame(objects, dtype=object)
        if array.ndim == 1:
            yield f"Float64 series with {mark}", pd.Series(objects).astype("Float64")
    yield "tensor", torch.from_numpy(np.where(mask, np.nan, array))


@pytest.mark.parametrize("name", FITS)
def test_a_missing_value_is_refused_in_every_argument(name):
    array, fit = FITS[name]
    for _, values in holed(array):
        with pytest.raises(ValueError, match=r"NaN|missing|finite"):
            fit(values)


@pytest.mark.parametrize("name", FITS)
def test_containers_without_a_missing_value_are_arrays(name):
    array, fit = FITS[name]
    forms = [np.ma.masked_array(array), array.tolist(), array.astype(object)]
    if array.ndim == 2:
        forms += [pd.DataFrame(array).convert_dtypes(), [np.ma.masked_array(row) for row in array]]
    for form in forms:
        fit(form)


def test_a_missing_entry_of_a_pursuit_is_unknown_whatever_marks_it():
    expected = None
    for form, values in holed(A):
        if form == "masked float32":
            continue
        found = PrincipalComponentPursuit(max_iter=3, tol=0.9).fit(values).low_rank_
        expected = found if expected is None else expected
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-12)


# Names


def frame(array, names="abcd"):
    return pd.DataFrame(array, columns=list(names))


@pytest.mark.parametrize("kernel", ["linear", "rbf", "softmax"])
@pytest.mark.parametrize("order", ["dcba", "abce"])
def test_the_columns_of_z_are_those_of_x(kernel, order):
    solver = KernelSVD(kernel=kernel, random_state=0)
    with pytest.raises(InputError, match=r"The feature names should match .* Z has"):
        solver.fit(frame(A), frame(B, order))
    for z in (frame(B), B, None):
        solver.fit(frame(A), z)
        with pytest.raises(InputError, match=r"The feature names should match .* Z has"):
            solver.transform(frame(A), frame(B, order))
        solver.transform(frame(A), frame(B))


def test_the_columns_of_z_are_those_of_x_in_the_primal_too():
    for solver in ("primal", "primal_stochastic"):
        with pytest.raises(InputError, match="The feature names should match"):
            KernelSVD(solver=solver).fit(frame(A), frame(B, "dcba"))
    stream = KernelSVD(solver="primal_stochastic").partial_fit(frame(A), frame(B))
    with pytest.raises(InputError, match="The feature names should match"):
        stream.partial_fit(frame(A), frame(B, "dcba"))


def test_where_z_has_columns_of_its_own_they_are_compared_with_those_of_the_fit():
    for solver in (
        KernelSVD(solver="primal", compatibility=np.eye(4)),
        KernelSVD(solver="primal", feature_map_z="identity"),
    ):
        solver.fit(frame(A), frame(B, "wxyz"))
        solver.transform(frame(A), frame(B, "wxyz"))
        with pytest.raises(InputError, match=r"The feature names should match .* Z has"):
            solver.transform(frame(A), frame(B, "zyxw"))


@pytest.mark.parametrize("kernel", ["features", "cubemax"])
def test_the_columns_of_samples_are_compared(kernel):
    samples = [frame(A), frame(B), frame(B[:5])]
    solver = MultilinearSVD(kernel=kernel)
    with pytest.raises(InputError, match=r"names should match .* sample 1 of X has"):
        solver.fit([frame(A), frame(B, "dcba"), frame(B[:5])])
    solver.fit(samples)
    solver.transform([None, frame(A), None])
    with pytest.raises(InputError, match=r"names should match .* sample 1 of X has"):
        solver.transform([None, frame(A, "dcba"), None])


def test_other_samples_have_columns_of_their_own():
    lift = np.ones((4, 4))
    solver = MultilinearSVD(kernel="features", compatibility=lift).fit([frame(A), frame(B, "wxyz")])
    solver.transform([None, frame(B, "wxyz")])
    with pytest.raises(InputError, match=r"names should match .* sample 1 of X has"):
        solver.transform([None, frame(B, "zyxw")])


# Global states


@pytest.mark.parametrize("mode", ["float64", "bfloat16", "inference", "no_grad", "meta"])
@pytest.mark.parametrize("name", FITS)
def test_a_solver_is_the_same_in_every_mode(mode, name):
    array, fit = FITS[name]

    def numbers():
        torch.manual_seed(0)
        found = fit(array)
        found = vars(found) if hasattr(found, "fit") else {"result": found}
        return {key: value for key, value in found.items() if isinstance(value, np.ndarray)}

    if "stochastic" not in name:
        expected = numbers()
    before = torch.get_default_dtype()
    try:
        if mode in ("float64", "bfloat16"):
            torch.set_default_dtype(getattr(torch, mode))
        with {
            "inference": torch.inference_mode, "no_grad": torch.no_grad, "meta": lambda: torch.device("meta"),
        }.get(mode, torch.enable_grad)():  # fmt: skip
            found = numbers()
    finally:
        torch.set_default_dtype(before)
    if "stochastic" not in name:
        for key, value in expected.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_whole_numbers_in_a_tensor_are_float64_as_in_an_array():
    whole = torch.arange(48).reshape(12, 4) % 7
    for solver in (KernelSVD(), KernelPCAValues(), PrincipalComponentPursuit(max_iter=2, tol=0.9)):
        solver.fit(whole)
    assert KernelSVD(random_state=0).fit(whole).singular_values_.dtype == torch.float64
    assert KernelSVD(random_state=0).fit(whole.double(), whole).right_scores_.dtype == torch.float64
