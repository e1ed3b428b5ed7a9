"""The elastic views: distances by the recursion, and features whose products are the kernel."""

from __future__ import annotations

import pytest
import torch

from kernel_attention.series.elastic import ElasticKernel, warped_distances


def by_recursion(a, b, band):
    """The distance of two series (c, L), cell by cell."""
    length = a.size(-1)
    found = torch.full((length + 1, length + 1), torch.inf, dtype=a.dtype)
    found[0, 0] = 0
    for i in range(length):
        for j in range(max(i - band, 0), min(i + band + 1, length)):
            before = torch.stack([found[i, j], found[i, j + 1], found[i + 1, j]]).min()
            found[i + 1, j + 1] = (a[:, i] - b[:, j]).square().sum() + before
    return found[length, length]


@pytest.mark.parametrize(("channels", "length", "band"), [(1, 1, 1), (2, 7, 1), (3, 13, 5), (23, 11, 2)])
def test_the_distance_is_that_of_the_recursion(channels, length, band):
    x = torch.randn(5, channels, length).double()
    y = torch.randn(3, channels, length).double()
    expected = torch.stack([torch.stack([by_recursion(a, b, band) for b in y]) for a in x])
    torch.testing.assert_close(warped_distances(x, y, band), expected)


@pytest.mark.parametrize("shapes", [False, True])
def test_products_of_the_features_of_references_are_the_kernel(shapes):
    x = torch.randn(11, 2, 37).cumsum(dim=-1)
    view = ElasticKernel(2, 37, 11, 2.0, shapes)
    view.fit([x], torch.Generator())
    features = view(x)
    distances = warped_distances(view.references, view.references, view.band)
    kernel = (-view.scale * distances).exp()
    values, vectors = torch.linalg.eigh(kernel.double())
    expected = (vectors * values.clamp_min(0)) @ vectors.mT
    torch.testing.assert_close((features @ features.mT).double(), expected, atol=1e-3, rtol=1e-3)


def test_a_shape_has_neither_level_nor_size():
    x = torch.randn(7, 2, 37)
    view = ElasticKernel(2, 37, 7, 4.0, shapes=True)
    view.fit([x], torch.Generator())
    torch.testing.assert_close(view(3 * x + 5), view(x), atol=1e-3, rtol=1e-3)
