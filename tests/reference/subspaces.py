"""Two samples, and the angles between the subspaces that a decomposition of them finds."""

import torch


def two_samples(n=31, m=23, p=7, q=7):
    return torch.randn(n, p, dtype=torch.float64), torch.randn(m, q, dtype=torch.float64)


def angles(first, second):
    """Principal angles between the spans of orthonormal columns, in degrees."""
    # Through sines: the cosine of a small angle has lost it.
    rest = second - first @ (first.mT @ second)
    return torch.linalg.svdvals(rest).clamp_max(1).asin().rad2deg()


def unit_columns(matrix):
    return torch.linalg.qr(matrix)[0]
