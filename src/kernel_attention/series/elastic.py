"""Views of series by their elastic distances to training series, where a class has few cases.

Sources: Sakoe, Chiba, "Dynamic programming algorithm optimization for spoken word recognition", IEEE TASSP
1978 (dynamic time warping in a band); Haasdonk, Bahlmann, "Learning with distance substitution kernels",
DAGM 2004.

Legend: B cases, c channels, n steps, N those that a view is made for, L steps that
are compared, m references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kernel_attention.series.views import View, resampled

MOST_REFERENCES = 256
_COMPARED = 96  # steps, to which series are resampled
_BAND = 0.1  # of these steps, by which two series may be shifted
_FEW_CHANNELS = 20  # whose differences are faster than a product
_CASES_AT_ONCE = 4
_SMALLEST = 1e-6  # of the largest eigenvalue, and a variance in that of the training data


class ElasticKernel(View):
    """Features whose products are exp(-a D / median D), where D is the time-warped distance of two series.

    Of the kernel matrix of the references, the part with eigenvalues above 0 is kept: k(x, R) V E^(-1/2), so
    that a linear machine on them is that of the kernel.

    Args:
        channels: c.
        length: N.
        num_references: m, training series.
        sharpness: a.
        shapes: whether every channel of a series has its own mean and deviation removed.
    """

    is_kernel = True
    references: Tensor
    map: Tensor
    scale: Tensor

    def __init__(
        self, channels: int, length: int, num_references: int, sharpness: float, shapes: bool = False
    ) -> None:
        super().__init__()
        self.sharpness, self.shapes = sharpness, shapes
        self.steps = min(length, _COMPARED)
        self.band = max(round(_BAND * self.steps), 1)
        self.num_features = num_references
        shape = (num_references, channels, self.steps)
        self.register_buffer("references", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("map", torch.eye(num_references, dtype=torch.float32))
        self.register_buffer("scale", torch.ones((), dtype=torch.float32))

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Take training series for references; where they are fewer than m, some repeatedly."""
        found = torch.cat([self._compared(x) for x in series])
        self.references.copy_(found[torch.arange(len(self.references)) % len(found)])
        distances = warped_distances(self.references, self.references, self.band).double()
        others = distances[~torch.eye(len(distances), dtype=torch.bool)]
        median = others.median() if len(others) else others.new_ones(())
        self.scale.copy_(self.sharpness / median.clamp_min(_SMALLEST))
        values, vectors = torch.linalg.eigh((-self.scale.double() * distances).exp())
        kept = values > _SMALLEST * values[-1]
        self.map.copy_(torch.where(kept, vectors / values.clamp_min(_SMALLEST).sqrt(), 0.0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, m)."""
        distances = warped_distances(self._compared(x), self.references.to(x), self.band)
        return (-self.scale.to(x) * distances).exp() @ self.map.to(x)

    def _compared(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, c, L)."""
        x = resampled(x, self.steps)
        if not self.shapes:
            return x
        variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
        return (x - mean) / (variance + _SMALLEST).sqrt()


def warped_distances(x: Tensor, y: Tensor, band: int) -> Tensor:
    """The smallest sum of squared differences along a path of steps, (B, c, L), (m, c, L) -> (B, m).

    A path pairs all steps of both series in order; the steps of a pair are at most ``band`` apart.
    """
    if x.size(1) > _FEW_CHANNELS:
        return torch.cat([_warped(part, y, band, _products(part, y)) for part in x.split(_CASES_AT_ONCE)])
    series, reversed_series = x.permute(1, 2, 0)[..., None], y.permute(1, 2, 0).flip(1)[:, :, None]

    def differences(first: int, end: int, offset: int) -> Tensor:
        there = reversed_series[:, first + offset : end + offset]
        return (series[:, first:end] - there).square().sum(dim=0)

    return _warped(x, y, band, differences)


def _products(x: Tensor, y: Tensor) -> Callable[[int, int, int], Tensor]:
    """The differences |x_i|^2 + |y_j|^2 - 2 x_i y_j of all steps at once, a product of many channels."""
    reversed_series = y.flip(-1).permute(1, 2, 0)  # (c, L, m)
    products = torch.tensordot(x.permute(0, 2, 1), reversed_series, dims=1)  # (B, L, L, m)
    squares = x.square().sum(dim=1)[:, :, None, None] + reversed_series.square().sum(dim=0)
    every = (squares - 2 * products).clamp_min(0)

    def differences(first: int, end: int, offset: int) -> Tensor:
        diagonal = every.diagonal(offset, dim1=1, dim2=2)  # (B, m, cells), from row max(-offset, 0) on
        start = first - max(-offset, 0)
        return diagonal[..., start : start + end - first].permute(2, 0, 1)

    return differences


def _warped(x: Tensor, y: Tensor, band: int, differences: Callable[[int, int, int], Tensor]) -> Tensor:
    """``warped_distances``, given the squared differences of a diagonal's steps x_i and y_(L-1-i-offset)."""
    length = x.size(-1)
    empty = x.new_full((1, len(x), len(y)), torch.inf)
    # D_ij = |x_i - y_j|^2 + min(D_(i-1)j, D_i(j-1), D_(i-1)(j-1)), diagonal by diagonal: i + j = s
    before = last = empty
    first_before = first_last = 0
    for s in range(2 * length - 1):
        first = max(0, s - length + 1, -((band - s) // 2))
        end = min(length, s + 1, (s + band) // 2 + 1)
        cost = differences(first, end, length - 1 - s)
        if s:
            straight = _rows(last, first_last, first - 1, end, empty)
            best = torch.minimum(straight[:-1], straight[1:])
            cost = cost + torch.minimum(best, _rows(before, first_before, first - 1, end - 1, empty))
        before, first_before = last, first_last
        last, first_last = cost, first
    return last[0]


def _rows(values: Tensor, first: int, start: int, end: int, empty: Tensor) -> Tensor:
    """Rows start to end of a matrix whose first row has this number; infinite where it has none."""
    above, below = max(first - start, 0), max(end - first - len(values), 0)
    inside = values[max(start - first, 0) : max(end - first, 0)]
    if not above and not below:
        return inside
    parts = [empty.expand(above, -1, -1), inside, empty.expand(below, -1, -1)]
    return torch.cat([part for part in parts if len(part)])
