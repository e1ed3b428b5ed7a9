"""Least squares in closed form: a linear map of the features of views of series, and the readout of a rocket
stem.

Legend: n cases, B of a batch, c channels, n_i steps of case i, N steps that the views are made for, F
features, k outputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.models import SequenceClassifier
from kernel_attention.series.elastic import MOST_REFERENCES, ElasticKernel
from kernel_attention.series.splits import SequenceSplit
from kernel_attention.series.views import (
    CompetingKernels,
    Hydra,
    IntervalQuantiles,
    RandomConvolutions,
    SeriesDuration,
    Shapelets,
    Spectrum,
    Stretched,
    View,
    resampled,
)
from kernel_attention.solvers import least_squares_svm

_SMALLEST_DEVIATION = 1e-3  # of a feature's mean over the tokens
_RANGE = 3.0  # of the temperature's logarithm, on both sides of 0
_PRIOR_DEVIATION = 0.5  # of the temperature's logarithm
_HALVINGS = 60


def fit_readout(
    model: SequenceClassifier, features: Iterable[np.ndarray], split: SequenceSplit, is_regression: bool
) -> None:
    """Set the readout of a model, whose stem is fitted.

    Classes have targets of -1 and 1. The temperature at which the leave-one-out outputs are most likely makes
    logits of them.

    Args:
        model: with ``readout=True``.
        features: of the training series, (M_i, F) each.
        split: whose targets and weights count.
        is_regression: whether the outputs are values.
    """
    read = torch.stack([torch.from_numpy(part).float().mean(dim=0) for part in features])
    deviation, mean = torch.std_mean(read, dim=0, correction=0)
    deviation = deviation.clamp_min(_SMALLEST_DEVIATION)
    read = read.sub_(mean).div_(deviation)
    targets = torch.as_tensor(split.targets)
    if is_regression:
        wanted = targets.reshape(len(targets), -1)
    else:
        wanted = 2.0 * F.one_hot(targets, len(model.readout_bias)) - 1
    if len(read) == 1:  # nothing is left when it is left out
        model.set_readout(torch.tensor(0.0), wanted[0])
        return
    weights = None if split.weights is None else torch.as_tensor(split.weights)
    machine = least_squares_svm(read, wanted, sample_weight=weights)
    temperature = 1.0 if is_regression else fit_temperature(machine.left_out, targets)
    weight = machine.weight / (temperature * deviation[:, None])
    model.set_readout(weight.mT, machine.intercept / temperature - mean @ weight)


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature T at which softmax(logits / T) is most likely, a posteriori (Guo et al. 2017).

    The logarithm of T has a normal prior of mean 0 and deviation 1/2. It decides where there are few cases: a
    model that is right in all of them would otherwise become certain of everything.

    Args:
        logits: (n, k), of held-out cases, which did not train the model.
        targets: (n,) class indices.
    """
    logits, targets = logits.double(), torch.as_tensor(targets)

    def surprise(log_temperature: float) -> float:
        nll = F.cross_entropy(
            logits / torch.tensor(log_temperature, dtype=torch.float32).double().exp(),
            targets,
            reduction="sum",
        )
        return nll.item() + (log_temperature / _PRIOR_DEVIATION) ** 2 / 2

    low, high = -_RANGE, _RANGE
    for _ in range(_HALVINGS):  # each keeps two thirds of the interval
        first, second = low + (high - low) / 3, high - (high - low) / 3
        if surprise(first) <= surprise(second):
            high = second
        else:
            low = first
    return float(torch.tensor((low + high) / 2, dtype=torch.float32).double().exp())


VIEWS = ("spectrum", "quantiles", "rocket", "convolutions", "shapelets", "hydra", "elastic", "shapes")
"""Where the time is short, the last ones are made smaller or left out."""
VIEWS_OF_LENGTHS = ("duration", *VIEWS, "stretched_convolutions")
"""Where series have different lengths."""
MOST_STEPS = 4096
"""Of a series that the views read; a longer one is resampled."""
ELASTIC = ("elastic", "shapes")
"""Views by distances to training series."""

_STRETCHED = "stretched_"
_CELLS_AT_ONCE = 2**19  # of 84 convolved series: they stay near the processor
_LARGEST_VALUE = 1e9  # of a series, in deviations of the training data: sums of its square are numbers
_LARGEST_FEATURE = 1e18


class ClosedForm(nn.Module):
    """A linear map of the features of several views; its buffers are what ``fit_closed_form`` found.

    Args:
        in_features: c.
        num_outputs: k, logits or values.
        length: N.
        views: names in ``VIEWS``.
        sizes: of the views that are smaller than 1, by name; see ``make_view``.
        rate: steps that the views read for every step of a series, at most ``MOST_STEPS`` of a whole one;
            None: every series is resampled to N, linearly in time.
    """

    rate: float | None = None  # also of an object that an earlier release pickled

    input_mean: Tensor
    input_std: Tensor
    intercept: Tensor

    def __init__(
        self,
        in_features: int,
        num_outputs: int,
        length: int,
        views: Sequence[str] = VIEWS,
        sizes: Mapping[str, float] | None = None,
        rate: float | None = None,
    ) -> None:
        super().__init__()
        self.length, self.rate = length, rate
        self.sizes = dict(sizes or {})
        made = {name: make_view(name, in_features, length, self.sizes.get(name, 1.0)) for name in views}
        self.views = nn.ModuleDict(made)
        self.register_buffer("input_mean", torch.zeros(in_features, dtype=torch.float64))
        self.register_buffer("input_std", torch.ones(in_features, dtype=torch.float64))
        self.register_buffer("intercept", torch.zeros(num_outputs, dtype=torch.float32))
        for name, view in made.items():
            self.register_buffer(f"{name}_mean", torch.zeros(view.num_features, dtype=torch.float32))
            self.register_buffer(
                f"{name}_weight", torch.zeros(view.num_features, num_outputs, dtype=torch.float32)
            )

    def steps(self, length: int) -> int:
        """Steps that the views read of a series of this length."""
        return self.length if self.rate is None else min(max(round(self.rate * length), 1), MOST_STEPS)

    def resampled(self, x: Tensor) -> Tensor:
        """Series (B, n_i, c), standardised and of ``steps``, (B, c, n); float32 unless x is float64."""
        scaled = ((x.double() - self.input_mean) / self.input_std).clamp(-_LARGEST_VALUE, _LARGEST_VALUE)
        scaled = scaled.to(x.dtype).mT
        return resampled(scaled, self.steps(scaled.size(-1)))

    def features(self, name: str, series: Tensor) -> Tensor:
        """The features of a view of ``resampled`` series, (B, F), of a size that products of them have."""
        features: Tensor = self.views[name](series)
        return features.clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make a module of this form."""
        channels, outputs = len(self.input_mean), len(self.intercept)
        options = {"in_features": channels, "num_outputs": outputs, "length": self.length}
        return options | {"views": list(self.views), "sizes": getattr(self, "sizes", {}), "rate": self.rate}

    def view(self, name: str) -> View:
        """The view of this name."""
        found = self.views[name]
        assert isinstance(found, View)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """(B, n_i, c) -> (B, k)."""
        return self.outputs(self.resampled(x))

    def outputs(self, series: Tensor) -> Tensor:
        """(B, c, n) of ``resampled`` -> (B, k)."""
        total = self.intercept.to(series)
        for name in self.views:
            mean, weight = getattr(self, f"{name}_mean"), getattr(self, f"{name}_weight")
            total = total + (self.features(name, series) - mean.to(series)) @ weight.to(series)
        return total

    @torch.no_grad()
    def predict(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """The outputs for series (n_i, c) of any lengths, (n, k) float32."""
        found = self.intercept.new_empty(len(sequences), len(self.intercept))
        for places, series in self.batches(sequences):
            found[places] = self.outputs(series)
        return found.nan_to_num(0.0)

    def rows(self, name: str, sequences: Sequence[np.ndarray]) -> Tensor:
        """The features of a view of series (n_i, c), (n, F) float32."""
        found = self.intercept.new_empty(len(sequences), self.view(name).num_features)
        for places, series in self.batches(sequences):
            found[places] = self.features(name, series)
        return found

    def batches(
        self, sequences: Sequence[np.ndarray], at_once: int | None = None
    ) -> Iterator[tuple[list[int], Tensor]]:
        """Places of series (n_i, c) that are of one length when ``resampled``, and these, float32.

        No series is padded. ``at_once``: as many at most; None: as many as the views are fast with.
        """
        groups: dict[int, list[int]] = {}
        for place, case in enumerate(sequences):
            groups.setdefault(self.steps(len(case)), []).append(place)
        for steps, group in groups.items():
            count = at_once or min(max(_CELLS_AT_ONCE // (84 * steps), 1), 64)
            for start in range(0, len(group), count):
                places = group[start : start + count]
                cases = (torch.from_numpy(np.array(sequences[place])[None]) for place in places)
                yield places, torch.cat([self.resampled(case).float() for case in cases])


def make_view(name: str, channels: int, length: int, size: float = 1.0) -> View:
    """A view of ``VIEWS``, or of an earlier release ("competing", "segments"), for series of this form.

    Of its kernels, levels of intervals or references, it has the part ``size``. "stretched_..." is a view of
    series that are resampled to N.
    """
    if name.startswith(_STRETCHED):
        return Stretched(make_view(name.removeprefix(_STRETCHED), channels, length, size), length)

    def part(whole: int) -> int:
        return max(round(size * whole), 1)

    if name == "spectrum":
        return Spectrum(channels, length)
    if name == "duration":
        return SeriesDuration()
    if name == "quantiles":
        return IntervalQuantiles(channels, length, depth=part(5))
    if name == "rocket":
        kernels = part(84)
        return RandomConvolutions(
            channels, length, part(8000), num_kernels=kernels, representations=1, octave=2
        )
    if name == "convolutions":
        return RandomConvolutions(channels, length, part(8000), num_kernels=part(84))
    if name == "segments":
        return RandomConvolutions(channels, length, part(1000), segments=8, num_kernels=part(84))
    if name == "hydra":
        return Hydra(channels, length, groups=part(8))
    if name == "shapelets":
        return Shapelets(channels, length, part(2000))
    if name == "competing":
        return CompetingKernels(channels, length, groups=part(8))
    is_shape = name == "shapes"
    return ElasticKernel(channels, length, part(MOST_REFERENCES), 4.0 if is_shape else 2.0, is_shape)
