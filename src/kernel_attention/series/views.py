"""Views of a series: features without a label, which a kernel machine reads in closed form.

Sources: Dempster et al., "MiniRocket", KDD 2021, and Tan et al., "MultiRocket", DMKD 2022 (convolutions and
first differences); Dempster et al., "Hydra", DMKD 2023 (competing kernels); Dempster et al., "QUANT",
DMKD 2024 (quantiles of dyadic intervals); Guillaume et al., "Random Dilated Shapelet Transform", ICPRAI 2022
(distances to pieces of training series); Barachant et al., "Multiclass brain-computer interface
classification by Riemannian geometry", IEEE TBME 2012 (logarithms of covariances).

Every view is a module whose buffers hold what it drew or took from the training series. All are
differentiable almost everywhere.

A view is made for series of N steps, and reads series of any n steps at their own pace: positions are
relative to the length, lags and frequencies are absolute, per step. The B cases of a call have one n.

Legend: B cases, c channels, n steps, N those that a view is made for, F features.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from kernel_attention.models.rocket_stem import KERNEL_SIZE, NUM_KERNELS, even_quantiles, rocket_kernels


def sorted_rows(values: Tensor) -> Tensor:
    """The values of every row, the last dimension, in order: (..., N) -> (..., N).

    NumPy's sort is several times faster on a CPU; torch's has a gradient.
    """
    if (
        values.requires_grad
        or values.device.type != "cpu"
        or values.dtype not in (torch.float32, torch.float64)
    ):
        return values.sort(dim=-1).values
    return torch.from_numpy(np.sort(values.numpy(), axis=-1))


_STEEPNESS = 100.0  # slope of a threshold, in deviations of what it divides
_MOST_DILATIONS = 8
_REPRESENTATIONS = 4
_FITTED_STEPS = 4096  # whose quantiles are thresholds
_SMALLEST_VARIANCE = 1e-6  # of a series, in variances of the training data
_SMALLEST_RESPONSE = 1e-9
_COMPETING = 8  # kernels of a group
_DECIDED = 10.0  # slope of a share in the distance of two responses, as a part of both
_UNDECIDED = 1e-4  # response that is as good as none, in deviations of the training data
_NEAREST = 0.05  # of the windows of training series are near a piece, or up to twice as many
_SMALLEST_RADIUS = 1e-3  # squared, of nine steps
_FLAT = 1e-4  # variance of a window, in variances of the training data
_DURATIONS = 16  # radial functions of a logarithm of steps
_SMALLEST_WIDTH = 1e-3
_MOST_CORRELATED = 32  # channels whose covariances are read; beyond, their powers alone
_SHRINKAGE = 0.1  # of a covariance towards a multiple of the identity
_SMALLEST_POWER = 1e-6
_NEAR = 1e-4  # relative difference of eigenvalues, below which its fourth power is nothing


class View(nn.Module):
    """Features of standardised series, (B, c, n) -> (B, F). ``fit`` sets what training data decide."""

    num_features: int
    is_kernel = False
    """Whether products of the features are a kernel as they are, so that none is divided by its deviation."""

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Draw and set the buffers from training series, (B, c, n) of one length or of several."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""
        raise NotImplementedError


def _dilations(length: int, octave: int) -> list[int]:
    """Powers of 2^(1/octave), with which nine taps span at most the series; at least [1]."""
    largest = int(math.log2(max((length - 1) / (KERNEL_SIZE - 1), 1)))
    found = {int(2 ** (exponent / octave)) for exponent in range(octave * largest + 1)}
    return sorted(found)[-_MOST_DILATIONS * octave :]


class Convolutions(View):
    """The base of views that convolve representations of a series, each with several dilations.

    The representations are the series, its first differences, and both of the series whose own mean and
    deviation are removed.

    Args:
        length: N.
        representations: of the four, how many.
        octave: dilations from one power of 2 to the next.
    """

    representations = _REPRESENTATIONS  # also of an object that an earlier release pickled

    def __init__(self, length: int, representations: int = _REPRESENTATIONS, octave: int = 1) -> None:
        super().__init__()
        self.representations = representations
        self.dilations = _dilations(length, octave)

    @property
    def sets(self) -> int:
        """Pairs of a representation and a dilation."""
        return self.representations * len(self.dilations)

    def weights_of(self, number: int) -> Tensor:
        """The kernels of a set, (K, c, 9)."""
        raise NotImplementedError

    def read(self, y: Tensor, number: int) -> Tensor:
        """The features of what the kernels of a set give: (B, K, n) -> (B, F / sets)."""
        raise NotImplementedError

    def convolved(self, x: Tensor, number: int) -> Tensor:
        """The kernels of a set over its representation, zeros outside: (B, c, n) -> (B, K, n)."""
        kind, place = divmod(number, len(self.dilations))
        if kind >= 2:
            variance, mean = torch.var_mean(x, dim=-1, correction=0, keepdim=True)
            x = (x - mean) / (variance + _SMALLEST_VARIANCE).sqrt()
        if kind % 2:
            x = F.pad(x.diff(dim=-1), (1, 0))
        dilation = self.dilations[place]
        padding = dilation * (KERNEL_SIZE // 2)
        return F.conv1d(x, self.weights_of(number).to(x), padding=padding, dilation=dilation)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""

        def part(x: Tensor, number: int) -> Tensor:
            return self.read(self.convolved(x, number), number)

        if torch.is_grad_enabled() and x.requires_grad:  # the graph of all sets would not fit into memory
            parts = [checkpoint(part, x, number, use_reentrant=False) for number in range(self.sets)]
        else:
            parts = [part(x, number) for number in range(self.sets)]
        return torch.cat(parts, dim=1)


class RandomConvolutions(Convolutions):
    """Shares of steps, of the series or of each of its segments, whose convolutions exceed thresholds.

    The 84 kernels of MiniRocket, each on random channels. The thresholds are quantiles of what the kernels
    give on training series.

    Args:
        channels: c.
        length: N.
        num_thresholds: of all kernels and representations, about.
        segments: parts of the series, each with a share of its own.
        num_kernels: how many of the 84, evenly spaced.
        representations: as in ``Convolutions``.
        octave: as in ``Convolutions``.
    """

    channel_weights: Tensor
    thresholds: Tensor
    slopes: Tensor
    taps: Tensor
    ramp: Callable[[Tensor], Tensor]

    def __init__(
        self,
        channels: int,
        length: int,
        num_thresholds: int,
        segments: int = 1,
        num_kernels: int = NUM_KERNELS,
        *,
        representations: int = _REPRESENTATIONS,
        octave: int = 1,
    ) -> None:
        super().__init__(length, representations, octave)
        segments = min(segments, length)
        self.edges = [round(place * length / segments) for place in range(segments + 1)]
        self.ramp = _ramp
        chosen = torch.linspace(0, NUM_KERNELS - 1, num_kernels, dtype=torch.float64).round().long()
        self.register_buffer("taps", rocket_kernels()[chosen], persistent=False)
        shape = (self.sets, len(self.taps), max(num_thresholds // (self.sets * len(self.taps)), 1))
        self.register_buffer("channel_weights", torch.zeros(*shape[:2], channels, dtype=torch.float32))
        self.register_buffer("thresholds", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("slopes", torch.ones(shape, dtype=torch.float32))
        self.num_features = math.prod(shape) * segments

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Draw the channels; set the thresholds to quantiles of training series."""
        sets, kernels, channels = self.channel_weights.shape
        self.channel_weights.copy_(_random_channels(sets, kernels, channels, generator))
        places = even_quantiles(self.thresholds.shape)
        for number in range(sets):
            parts = [self.convolved(x, number).transpose(0, 1).flatten(1) for x in series]
            values = torch.cat(parts, dim=1)
            values = sorted_rows(values[:, :: -(-values.size(1) // _FITTED_STEPS)])
            chosen = (places[number] * (values.size(1) - 1)).round().long()
            self.thresholds[number] = values.gather(1, chosen)
            deviation = values.std(dim=1, keepdim=True, correction=0).clamp_min(1e-6)
            self.slopes[number] = _STEEPNESS / deviation

    def weights_of(self, number: int) -> Tensor:
        """The kernels of a set, (K, c, 9)."""
        return self.taps[:, None] * self.channel_weights[number][..., None]

    def read(self, y: Tensor, number: int) -> Tensor:
        """The shares of steps beyond every threshold: (B, K, n) -> (B, F / sets)."""
        slopes = self.slopes[number].to(y)
        y = y * slopes[:, :1]  # that of all thresholds of a kernel
        segments = [_scaled(a, b, self.edges[-1], y.size(-1)) for a, b in itertools.pairwise(self.edges)]
        parts = []
        for threshold in (self.thresholds[number].to(y) * slopes).unbind(-1):
            # One threshold at a time: B K n Q numbers would not stay in the cache.
            exceeding = self.ramp(y - threshold[:, None])
            parts += [exceeding[..., a:b].mean(dim=-1) for a, b in segments]
        return torch.cat(parts, dim=1)


class CompetingKernels(Convolutions):
    """How strongly each random kernel of a group of eight responds where it responds most, or least.

    Classifiers of earlier releases have it; ``Hydra`` knows more.

    Args:
        channels: c.
        length: N.
        groups: for every dilation and representation.
    """

    kernels: Tensor

    def __init__(self, channels: int, length: int, groups: int = 8) -> None:
        super().__init__(length)
        self.groups = groups
        shape = (self.sets, groups * _COMPETING, channels, KERNEL_SIZE)
        self.register_buffer("kernels", torch.zeros(shape, dtype=torch.float32))
        self.num_features = 2 * shape[0] * shape[1]

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Draw the kernels: those of a group read the same random channels."""
        sets, kernels, channels, taps = self.kernels.shape
        drawn = torch.randn(sets, kernels, 1, taps, generator=generator, dtype=torch.float32)
        drawn -= drawn.mean(dim=-1, keepdim=True)
        drawn /= drawn.abs().sum(dim=-1, keepdim=True)
        read = max(min(channels, _COMPETING) // 2, 1)
        mask = _ranks(sets, self.groups, channels, generator) < read
        self.kernels.copy_(drawn * mask.repeat_interleave(_COMPETING, dim=1)[..., None])

    def weights_of(self, number: int) -> Tensor:
        """The kernels of a set, (K, c, 9)."""
        return self.kernels[number]

    def read(self, y: Tensor, number: int) -> Tensor:
        """Square roots of the mean responses of the winners: (B, K, n) -> (B, 2 K)."""
        grouped = y.unflatten(1, (self.groups, _COMPETING))
        parts = []
        for signed in (grouped, -grouped):
            wins = signed == signed.amax(dim=2, keepdim=True)
            response = (signed * wins).clamp_min(0).mean(dim=-1)
            parts.append(response.flatten(1).add(_SMALLEST_RESPONSE).sqrt())
        return torch.cat(parts, dim=1)


class Hydra(CompetingKernels):
    """How strongly each kernel of a group of eight responds where it responds most, and how often least.

    That a kernel responds least at a step is a ramp of its distance from the other that responds least, as a
    part of both responses, so that the share of such steps has a gradient.

    Args:
        channels: c.
        length: N.
        groups: for every dilation and representation.
    """

    ramp: Callable[[Tensor], Tensor]
    unit: Callable[[Tensor], Tensor]
    root: Callable[[Tensor], Tensor]

    def __init__(self, channels: int, length: int, groups: int = 8) -> None:
        super().__init__(channels, length, groups)
        self.ramp, self.unit, self.root = _ramp, _own, _root

    def read(self, y: Tensor, number: int) -> Tensor:
        """Square roots of mean responses and of shares of steps: (B, K, n) -> (B, 2 K)."""
        grouped = y.unflatten(1, (self.groups, _COMPETING))
        wins = grouped == grouped.amax(dim=2, keepdim=True)
        response = (grouped * wins).clamp_min(0).mean(dim=-1)
        least = grouped.amin(dim=2, keepdim=True)
        loses = grouped == least
        second = grouped.masked_fill(loses, torch.inf).amin(dim=2, keepdim=True)
        second = torch.where(second.isinf(), least, second)  # of equal responses
        other = torch.where(loses, second, least)
        distance = (other - grouped) / self.unit(other.abs() + grouped.abs() + _UNDECIDED)
        share = self.ramp(distance.mul_(_DECIDED).add_(0.5)).mean(dim=-1)
        return self.root(torch.cat([response.flatten(1), share.flatten(1)], dim=1))


class Shapelets(Convolutions):
    """How near a series comes to pieces of training series, and at how many steps it is near.

    A piece has nine steps of random channels, dilated. It is compared with the windows of a series as they
    are, or each with its own mean and deviation removed. Near is a quantile of what training series give.

    Args:
        channels: c.
        length: N.
        num_pieces: of all dilations, about.
    """

    pieces: Tensor
    channel_weights: Tensor
    radii: Tensor
    ramp: Callable[[Tensor], Tensor]

    def __init__(self, channels: int, length: int, num_pieces: int) -> None:
        super().__init__(length, representations=2)
        self.ramp = _ramp
        shape = (self.sets, max(num_pieces // self.sets, 1), channels, KERNEL_SIZE)
        self.register_buffer("pieces", torch.zeros(shape, dtype=torch.float32))
        self.register_buffer("channel_weights", torch.zeros(shape[:3], dtype=torch.float32))
        self.register_buffer("radii", torch.ones(shape[:2], dtype=torch.float32))
        self.num_features = 2 * shape[0] * shape[1]

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Draw the pieces and their channels; set the radii to quantiles of training series."""
        sets, count, channels, _ = self.pieces.shape
        self.channel_weights.copy_(_random_channels(sets, count, channels, generator))
        sources = [case[None] for batch in series for case in batch]
        for number in range(sets):
            drawn = torch.rand(3, count, generator=generator, dtype=torch.float32)
            for place, (case, start) in enumerate(drawn[:2].mT.tolist()):
                windows = self.windows(sources[int(case * len(sources))], number)[0]
                self.pieces[number, place] = windows[int(start * len(windows))]
            self.pieces[number] *= self.channel_weights[number][..., None]
            self.radii[number] = 1.0
            found = torch.cat([self.convolved(x, number).transpose(0, 1).flatten(1) for x in series], dim=1)
            found = sorted_rows(found[:, :: -(-found.size(1) // _FITTED_STEPS)])
            chosen = (_NEAREST * (1 + drawn[2]) * (found.size(1) - 1)).round().long()
            self.radii[number] = found.gather(1, chosen[:, None])[:, 0].clamp_min(_SMALLEST_RADIUS)

    def windows(self, x: Tensor, number: int) -> Tensor:
        """Nine dilated steps from every step on that they fit behind: (B, c, n) -> (B, W, c, 9)."""
        kind, place = divmod(number, len(self.dilations))
        dilation = self.dilations[place]
        missing = dilation * (KERNEL_SIZE - 1) + 1 - x.size(-1)
        x = F.pad(x, (0, max(missing, 0)), mode="replicate")
        windows = x.unfold(-1, dilation * (KERNEL_SIZE - 1) + 1, 1)[..., ::dilation].transpose(1, 2)
        if not kind:
            return windows
        variance, mean = torch.var_mean(windows, dim=-1, correction=0, keepdim=True)
        return (windows - mean) / (variance + _FLAT).sqrt()

    def convolved(self, x: Tensor, number: int) -> Tensor:
        """Squared distances of pieces and windows, in squared radii: (B, c, n) -> (B, K, W)."""
        windows, pieces = self.windows(x, number), self.pieces[number].to(x)
        # |w - p|^2 = |w|^2 + |p|^2 - 2 w p, of the channels of p, as one product
        left = torch.cat([windows.flatten(2), windows.square().sum(dim=-1)], dim=-1)
        right = torch.cat([-2 * pieces.flatten(1), self.channel_weights[number].to(x)], dim=-1)
        radii = self.radii[number].to(x)
        distances = left @ (right / radii[:, None]).mT + pieces.square().sum(dim=(1, 2)) / radii
        return distances.mT

    def read(self, y: Tensor, number: int) -> Tensor:
        """exp(-d^2) of the nearest window, and the share of near ones: (B, K, W) -> (B, 2 K)."""
        nearest = (-y.amin(dim=-1).clamp_min(0)).exp()
        return torch.cat([nearest, self.ramp(2.5 - 2 * y).mean(dim=-1)], dim=1)


class SeriesDuration(View):
    """Radial functions of the logarithm of the number of steps, around quantiles of training series."""

    middles: Tensor
    width: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.num_features = _DURATIONS
        self.register_buffer("middles", torch.zeros(_DURATIONS, dtype=torch.float32))
        self.register_buffer("width", torch.ones((), dtype=torch.float32))

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Take the quantiles of training series for middles."""
        steps = [float(x.size(-1)) for x in series for _ in x]
        places = torch.linspace(0, 1, _DURATIONS, dtype=torch.float32)
        self.middles.copy_(torch.tensor(steps).log().quantile(places))
        span = self.middles[-1] - self.middles[0]
        self.width.copy_((1.5 * span / (_DURATIONS - 1)).clamp_min(_SMALLEST_WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""
        distance = (math.log(x.size(-1)) - self.middles.to(x)) / self.width.to(x)
        return (-distance.square() / 2).exp().expand(len(x), -1)


class Stretched(View):
    """A view of series that are resampled to one length, linearly in time: tempo does not count.

    Args:
        view: of N steps.
        length: N.
    """

    def __init__(self, view: View, length: int) -> None:
        super().__init__()
        self.view, self.length = view, length
        self.num_features = view.num_features

    def fit(self, series: Sequence[Tensor], generator: torch.Generator) -> None:
        """Fit the view to resampled series."""
        self.view.fit([torch.cat([resampled(x, self.length) for x in series])], generator)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""
        features: Tensor = self.view(resampled(x, self.length))
        return features


class IntervalQuantiles(View):
    """Quantiles of dyadic intervals of the series, its first and second differences and its spectrum.

    Args:
        channels: c.
        length: N.
        depth: halvings; fewer where the intervals would be shorter than four steps.
    """

    def __init__(self, channels: int, length: int, depth: int = 5) -> None:
        super().__init__()
        self.plan = [
            _intervals(steps, depth)
            for steps in (length, max(length - 1, 1), max(length - 2, 1), length // 2 + 1)
        ]
        self.num_features = channels * sum(len(places) for plan in self.plan for *_, places in plan)

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""
        first = x.diff(dim=-1) if x.size(-1) > 1 else torch.zeros_like(x)
        second = first.diff(dim=-1) if first.size(-1) > 1 else torch.zeros_like(first)
        parts = []
        for series, plan in zip((x, first, second, _amplitudes(x)), self.plan, strict=True):
            (_, whole, _), length = plan[0], series.size(-1)
            for start, stop, places in plan:
                a, b = _scaled(start, stop, whole, length)
                ordered = sorted_rows(series[..., a:b])
                ranks = (places * ((b - a - 1) / max(stop - start - 1, 1))).round().long()
                parts.append(ordered[..., ranks].flatten(1))
        return torch.cat(parts, dim=1)


class Spectrum(View):
    """Logarithms of the power in bands, and of the covariances of the channels in five wider bands.

    The bands are evenly spaced on a logarithmic scale. A covariance is shrunk by a tenth towards a
    multiple of the identity; of its matrix logarithm, the upper triangle is read.

    Args:
        channels: c.
        length: N.
        bands: of the powers.
    """

    def __init__(self, channels: int, length: int, bands: int = 24) -> None:
        super().__init__()
        self.bands = _bands(length // 2 + 1, bands)
        self.wide = [(0, length // 2 + 1), *_bands(length // 2 + 1, 5)]
        self.correlated = 1 < channels <= _MOST_CORRELATED
        self.num_features = channels * len(self.bands)
        if self.correlated:
            self.num_features += len(self.wide) * channels * (channels + 1) // 2

    def forward(self, x: Tensor) -> Tensor:
        """(B, c, n) -> (B, F)."""
        bins = self.wide[0][1]
        # A shorter series has as many bins by zeros behind it; its power is that of its own steps.
        length = max(x.size(-1), 2 * (bins - 1))
        spectrum = torch.fft.rfft(x - x.mean(dim=-1, keepdim=True), n=length, norm="ortho")
        if length > x.size(-1):
            spectrum = spectrum * (length / x.size(-1)) ** 0.5
        bands, wide = (
            [_scaled(a, b, bins, spectrum.size(-1)) for a, b in given] for given in (self.bands, self.wide)
        )
        power = spectrum.real.square() + spectrum.imag.square()
        means = [power[..., a:b].mean(dim=-1) for a, b in bands]
        parts = [torch.stack(means, dim=-1).add(_SMALLEST_POWER).log().flatten(1)]
        if self.correlated:
            channels = x.size(1)
            upper = torch.triu_indices(channels, channels)
            weight = torch.where(upper[0] == upper[1], 1.0, 2**0.5).to(x)
            identity = torch.eye(channels).to(x)
            for a, b in wide:
                pair = torch.cat((spectrum[..., a:b].real, spectrum[..., a:b].imag), dim=-1)
                covariance = pair @ pair.mT / (b - a)
                trace = covariance.diagonal(dim1=-2, dim2=-1).mean(dim=-1)[:, None, None]
                covariance = (1 - _SHRINKAGE) * covariance + (_SHRINKAGE * trace + _SMALLEST_POWER) * identity
                logarithm = _MatrixLogarithm.apply(covariance)
                parts.append(logarithm[:, upper[0], upper[1]] * weight)
        return torch.cat(parts, dim=1)


class _MatrixLogarithm(torch.autograd.Function):
    """The logarithm of symmetric matrices, (B, c, c), whose gradient is finite for equal eigenvalues too."""

    @staticmethod
    def forward(ctx: Any, matrix: Tensor) -> Tensor:
        values, vectors = torch.linalg.eigh(matrix)
        values = values.clamp_min(_SMALLEST_POWER / 10)
        ctx.save_for_backward(values, vectors)
        return (vectors * values.log()[:, None]) @ vectors.mT

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        # Daleckii & Krein: d log M = V (G * (V^T dM V)) V^T with G_ij = (log l_i - log l_j) / (l_i - l_j)
        values, vectors = ctx.saved_tensors
        rows, columns = values[..., :, None], values[..., None, :]
        mean = (rows + columns) / 2
        half = (rows - columns) / (rows + columns)  # log l_i - log l_j = 2 artanh(half)
        near = half.abs() < _NEAR
        quotient = torch.where(near, 1 + half.square() / 3, half.atanh() / half.masked_fill(near, 1.0))
        return vectors @ (quotient / mean * (vectors.mT @ grads[0] @ vectors)) @ vectors.mT


def resampled(x: Tensor, length: int) -> Tensor:
    """Series (B, c, n) of this length, linearly in time."""
    if x.size(-1) == length:
        return x
    return F.interpolate(x, size=length, mode="linear", align_corners=True)


def _scaled(start: int, stop: int, whole: int, length: int) -> tuple[int, int]:
    """The part of ``length`` places that start to stop are of ``whole``; one place at least."""
    first = min(round(start * length / whole), length - 1)
    return first, max(round(stop * length / whole), first + 1)


def _amplitudes(x: Tensor) -> Tensor:
    spectrum = torch.fft.rfft(x, norm="ortho")
    return (spectrum.real.square() + spectrum.imag.square() + 1e-12).sqrt()


def _bands(bins: int, count: int) -> list[tuple[int, int]]:
    """Ranges of frequencies above 0, evenly spaced on a logarithmic scale, each of one bin at least."""
    if bins < 3:
        return [(0, bins)]
    edges = sorted({round(bins ** (place / count)) for place in range(count + 1)})
    return list(itertools.pairwise(edges))


def _intervals(length: int, depth: int) -> list[tuple[int, int, Tensor]]:
    """(start, stop, ranks) of dyadic intervals, and of those shifted by half their width."""
    found = []
    for level in range(depth + 1):
        parts = 2**level
        width = length / parts
        if level and width < 4:
            break
        starts = [part * width for part in range(parts)]
        starts += [(part + 0.5) * width for part in range(parts - 1)]
        for start in starts:
            a, b = round(start), min(max(round(start + width), round(start) + 1), length)
            steps = b - a
            count = min(max(1 + (steps - 1) // 4, 1), max(32 // parts, 3))
            ranks = (
                torch.linspace(0, steps - 1, count).round().long()
                if count > 1
                else torch.tensor([steps // 2])
            )
            found.append((a, b, ranks))
    return found


def _ramp(distance: Tensor) -> Tensor:
    """How far a step exceeds a threshold, 0 to 1, from its distance in widths of the slope; in place."""
    return distance.clamp_(0, 1)


def _root(response: Tensor) -> Tensor:
    return response.add(_SMALLEST_RESPONSE).sqrt()


def _own(unit: Tensor) -> Tensor:
    """The unit of a distance of responses: their own sizes."""
    return unit


def _ranks(sets: int, rows: int, channels: int, generator: torch.Generator) -> Tensor:
    """A random order of the channels for every row, (sets, rows, c)."""
    drawn = torch.rand(sets, rows, channels, generator=generator, dtype=torch.float32)
    return drawn.argsort(-1).argsort(-1)


def _random_channels(sets: int, rows: int, channels: int, generator: torch.Generator) -> Tensor:
    """Which channels every row reads, (sets, rows, c): few more often than many, nine at most."""
    most = min(channels, KERNEL_SIZE)
    drawn = torch.rand(sets, rows, 1, generator=generator, dtype=torch.float32)
    sizes = (2 ** (drawn * math.log2(most + 1))).floor().clamp(1, most)
    return _ranks(sets, rows, channels, generator) < sizes
