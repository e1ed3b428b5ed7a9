"""Kernel functions against loops over pairs of points, in float64."""

import math

import pytest
import torch

from kernel_attention.errors import InputError
from kernel_attention.tensors.features.kernel_functions import (
    KERNEL_FUNCTIONS,
    get_kernel_function,
    takes_reference,
)

N, M, P = 7, 5, 3


def by_loops(entry, x, z):
    return torch.tensor([[entry(a.tolist(), b.tolist()) for b in z] for a in x], dtype=torch.float64)


def dot(a, b):
    return sum(s * t for s, t in zip(a, b, strict=True))


def squared_distance(a, b):
    return sum((s - t) ** 2 for s, t in zip(a, b, strict=True))


ENTRIES = {
    "linear": ({}, dot),
    "cosine": ({}, lambda a, b: dot(a, b) / math.sqrt(dot(a, a) * dot(b, b))),
    "polynomial": ({}, lambda a, b: (dot(a, b) / P + 1) ** 3),
    "rbf": ({}, lambda a, b: math.exp(-squared_distance(a, b) / P)),
    "exponential": ({}, lambda a, b: math.exp(dot(a, b) / math.sqrt(P))),
    "softmax": ({}, lambda a, b: math.exp(dot(a, b) / math.sqrt(P))),
    "sne": ({}, lambda a, b: math.exp(-squared_distance(a, b) / P)),
}
CHOSEN = {
    "polynomial": ({"gamma": 0.3, "degree": 2, "coef0": 0.7}, lambda a, b: (0.3 * dot(a, b) + 0.7) ** 2),
    "rbf": ({"gamma": 2}, lambda a, b: math.exp(-2 * squared_distance(a, b))),
    "exponential": ({"gamma": -0.4}, lambda a, b: math.exp(-0.4 * dot(a, b))),
    "softmax": ({"gamma": 1.7}, lambda a, b: math.exp(1.7 * dot(a, b))),
    "sne": ({"gamma": 0.6}, lambda a, b: math.exp(-0.6 * squared_distance(a, b))),
}
CASES = [
    pytest.param(name, *case, id=f"{name}-{kind}")
    for kind, table in (("default", ENTRIES), ("chosen", CHOSEN))
    for name, case in table.items()
]


def test_every_kernel_is_tested():
    assert set(ENTRIES) == set(KERNEL_FUNCTIONS)


@pytest.mark.parametrize(("name", "parameters", "entry"), CASES)
def test_kernel_is_its_formula(name, parameters, entry):
    x, z = torch.randn(N, P, dtype=torch.float64), torch.randn(M, P, dtype=torch.float64)
    expected = by_loops(entry, x, z)
    if name in {"softmax", "sne"}:
        expected = expected / expected.sum(dim=1, keepdim=True)
    torch.testing.assert_close(get_kernel_function(name, **parameters)(x, z), expected)


@pytest.mark.parametrize("name", ["softmax", "sne"])
def test_a_new_point_is_measured_against_the_sample_of_the_fit(name):
    x, z = torch.randn(N, P, dtype=torch.float64), torch.randn(M, P, dtype=torch.float64)
    kernel = get_kernel_function(name)
    assert takes_reference(kernel)
    torch.testing.assert_close(kernel(x, z[1:3], reference=z), kernel(x, z)[:, 1:3])


@pytest.mark.parametrize("name", ["softmax", "sne", "rbf"])
def test_large_inputs_stay_finite(name):
    x = 1e3 * torch.randn(N, P)
    assert get_kernel_function(name)(x, x).isfinite().all()


@pytest.mark.parametrize("name", ["rbf", "sne"])
def test_distances_survive_far_from_the_origin(name):
    x, z = 1e3 + torch.randn(N, P), 1e3 + torch.randn(M, P)
    exact = get_kernel_function(name)(x.double(), z.double())
    torch.testing.assert_close(get_kernel_function(name)(x, z).double(), exact, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", sorted(KERNEL_FUNCTIONS))
def test_gradients(name):
    x, z = (torch.randn(n, P, dtype=torch.float64, requires_grad=True) for n in (N, M))
    assert torch.autograd.gradcheck(get_kernel_function(name), (x, z))


@pytest.mark.parametrize(
    ("kernel", "parameters", "words"),
    [
        ("rbff", {}, "unknown kernel 'rbff'; did you mean 'rbf'"),
        (3, {}, "kernel=3 must be a callable or one of: cosine"),
        ("rbf", {"gama": 1}, "unknown parameter of kernel 'rbf' 'gama'; did you mean 'gamma'"),
        ("rbf", {"gamma": 0}, "gamma=0 of kernel 'rbf' must be above 0"),
        ("sne", {"gamma": "scale"}, "gamma='scale' of kernel 'sne' must be a finite number"),
        ("softmax", {"gamma": math.nan}, "gamma=nan"),
        ("polynomial", {"degree": -1}, "degree=-1 of kernel 'polynomial' must be above 0"),
    ],
)
def test_bad_kernels(kernel, parameters, words):
    with pytest.raises(InputError, match=words.replace("?", r"\?")):
        get_kernel_function(kernel, **parameters)


@pytest.mark.parametrize("scale", [1e-300, 1e-20, 1e20, 1e300])
def test_the_cosine_does_not_know_lengths(scale):
    x, z = torch.randn(5, 3, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    cosine = get_kernel_function("cosine")
    torch.testing.assert_close(cosine(scale * x, z / scale), cosine(x, z))
    assert not cosine(0 * x, z).any()
