"""Least-squares SVMs on views of series, in closed form, stacked by their leave-one-out predictions.

Legend: n cases, c channels, n_i steps of case i, N steps that a view reads, F features, k outputs, m
landmarks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention.series import deadline as clock
from kernel_attention.series.deadline import Deadline
from kernel_attention.series.elastic import MOST_REFERENCES, ElasticKernel
from kernel_attention.series.splits import SequenceSplit, Standardizer
from kernel_attention.series.views import (
    CompetingKernels,
    IntervalQuantiles,
    RandomConvolutions,
    Spectrum,
    View,
)
from kernel_attention.solvers.least_squares_svm import KernelLeastSquaresSVM, kernel_least_squares_svm

VIEWS = ("spectrum", "quantiles", "convolutions", "segments", "competing", "elastic", "shapes")
"""Where the time is short, the last ones are made smaller or left out."""
MOST_STEPS = 4096
"""Of a series that the views read; a longer one is resampled."""
MOST_LANDMARKS = 1024
"""Cases up to which the machines are exact; of more, these many carry the kernel."""

_PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(3, -11, -1))
_ELASTIC = ("elastic", "shapes")
_MOST_ELASTIC = 512  # cases: of more, the other views know enough
_FITTED_CASES = 64  # that give thresholds
_TIMED_CASES = 8
_TIMED_PART = 32  # of all cases, at most one of so many is timed
_FIRST = 4.0  # how much slower the first may be
_SIZES = (1.0, 0.5, 0.25, 0.125)  # of a view, the first that fits into the time
_PRODUCT = 384  # rows and columns of a matrix whose square is timed
_MARGIN = 1.2  # on what work is expected to take
_CELLS_AT_ONCE = 2**19  # of 84 convolved series: they stay near the processor
_SMALLEST_DEVIATION = 1e-6  # of a feature
_START = 3.0  # sum of the weights; outputs of -1 and 1 become log-odds of 6
_PRIOR_DEVIATION = 0.5  # of the logarithm of that sum
_LARGEST_FEATURE = 1e18
_NEWTON_STEPS = 30
_SMALLEST_STEP = 1e-5


class ClosedForm(nn.Module):
    """A linear map of the features of several views; its buffers are what ``fit_closed_form`` found.

    Args:
        in_features: c.
        num_outputs: k, logits or values.
        length: N. Series of other lengths are resampled to it, linearly in time.
        views: names in ``VIEWS``.
        sizes: of the views that are smaller than 1, by name; see ``make_view``.
    """

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
    ) -> None:
        super().__init__()
        self.length = length
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

    def resampled(self, x: Tensor) -> Tensor:
        """Series (B, n_i, c), standardised and of N steps, (B, c, N); float32 unless x is float64."""
        scaled = ((x.double() - self.input_mean) / self.input_std).to(x.dtype).mT
        if scaled.size(-1) == self.length:
            return scaled
        return F.interpolate(scaled, size=self.length, mode="linear", align_corners=True)

    def features(self, name: str, series: Tensor) -> Tensor:
        """The features of a view of ``resampled`` series, (B, F), of a size that products of them have."""
        features: Tensor = self.views[name](series)
        return features.clamp(-_LARGEST_FEATURE, _LARGEST_FEATURE)

    @property
    def options(self) -> dict[str, Any]:
        """The arguments that make a module of this form."""
        channels, outputs = len(self.input_mean), len(self.intercept)
        options = {"in_features": channels, "num_outputs": outputs, "length": self.length}
        return options | {"views": list(self.views), "sizes": getattr(self, "sizes", {})}

    @property
    def cases_at_once(self) -> int:
        """As many cases as the views are fast with."""
        return min(max(_CELLS_AT_ONCE // (84 * self.length), 1), 64)

    def view(self, name: str) -> View:
        """The view of this name."""
        found = self.views[name]
        assert isinstance(found, View)
        return found

    def forward(self, x: Tensor) -> Tensor:
        """(B, n_i, c) -> (B, k)."""
        return self.outputs(self.resampled(x))

    def outputs(self, series: Tensor) -> Tensor:
        """(B, c, N) of ``resampled`` -> (B, k)."""
        total = self.intercept.to(series)
        for name in self.views:
            mean, weight = getattr(self, f"{name}_mean"), getattr(self, f"{name}_weight")
            total = total + (self.features(name, series) - mean.to(series)) @ weight.to(series)
        return total

    @torch.no_grad()
    def predict(self, sequences: Sequence[np.ndarray]) -> Tensor:
        """The outputs for series (n_i, c) of any lengths, (n, k) float32."""
        parts = [self.outputs(series) for series in self.batches(sequences)]
        return torch.cat(parts).nan_to_num(0.0)

    def batches(self, sequences: Sequence[np.ndarray]) -> Iterator[Tensor]:
        """The ``resampled`` series, float32, ``cases_at_once`` of them at a time."""
        for start in range(0, len(sequences), self.cases_at_once):
            part = sequences[start : start + self.cases_at_once]
            yield torch.cat([self.resampled(torch.from_numpy(np.array(case)[None])).float() for case in part])


def make_view(name: str, channels: int, length: int, size: float = 1.0) -> View:
    """A view of ``VIEWS`` for series of this form.

    Of its kernels, levels of intervals or references, it has the part ``size``.
    """

    def part(whole: int) -> int:
        return max(round(size * whole), 1)

    if name == "spectrum":
        return Spectrum(channels, length)
    if name == "quantiles":
        return IntervalQuantiles(channels, length, depth=part(5))
    if name == "convolutions":
        return RandomConvolutions(channels, length, part(8000), num_kernels=part(84))
    if name == "segments":
        return RandomConvolutions(channels, length, part(1000), segments=8, num_kernels=part(84))
    if name == "competing":
        return CompetingKernels(channels, length, groups=part(8))
    is_shape = name == "shapes"
    return ElasticKernel(channels, length, part(MOST_REFERENCES), 4.0 if is_shape else 2.0, is_shape)


class ClosedFormFit(NamedTuple):
    """A fitted module, and its output for every training case if that had been left out, (n, k) float32.

    ``weights``: of the machines by name: of every view, and "all", on the sum of the views' kernels;
    ``scores``: their leave-one-out predictions, (n, k) float64 each.
    """

    module: ClosedForm
    left_out: Tensor
    weights: dict[str, float]
    scores: dict[str, Tensor]


@torch.no_grad()
def fit_closed_form(
    split: SequenceSplit,
    num_outputs: int,
    max_len: int,
    *,
    is_regression: bool = False,
    seed: int = 0,
    views: Sequence[str] = VIEWS,
    max_seconds: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ClosedFormFit:
    """Fit a least-squares SVM on every view and one on all of them, and stack them.

    A kernel is the linear one of standardised features. The penalty of a machine is the one with the smallest
    leave-one-out log-loss, or squared error. The machines' weights, none of them negative, minimise the same
    loss of the sum of their leave-one-out predictions. Beyond 1,024 cases, a random choice of so many are the
    landmarks of Nystrom's features, so that time and memory grow linearly with n.

    Args:
        split: the training cases.
        num_outputs: k; classes have targets of -1 and 1.
        max_len: steps that the views read, at most ``MOST_STEPS``.
        is_regression: whether the targets are values.
        seed: of the random views and landmarks.
        views: names in ``VIEWS``; the elastic ones are left out beyond 512 cases.
        max_seconds: a view that would pass this time has fewer kernels or is left out, except for the first.
        on_progress: called with a line of text before every view.
    """
    deadline = Deadline(max_seconds)
    scale = Standardizer.fit(split.sequences)
    n, channels = len(split), split.sequences[0].shape[1]
    length = min(max_len, MOST_STEPS)
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(n, generator=generator)
    places = order[:MOST_LANDMARKS].sort().values if n > MOST_LANDMARKS else torch.arange(n)
    landmarks = [split.sequences[place] for place in places.tolist()]
    sample = [split.sequences[place] for place in order[:MOST_REFERENCES].tolist()]
    if n > _MOST_ELASTIC:
        views = [name for name in views if name not in _ELASTIC]
    # Of fewer cases than references, elastic views have a part.
    whole = dict.fromkeys(_ELASTIC, min(n / MOST_REFERENCES, 1.0))
    targets = torch.as_tensor(split.targets)
    wanted = targets.double().reshape(n, -1)
    if not is_regression:
        wanted = 2.0 * F.one_hot(targets, num_outputs).double() - 1
    case_weights = None if split.weights is None else torch.as_tensor(split.weights).double()

    def scaled_module(names: Sequence[str], sizes: Mapping[str, float] | None = None) -> ClosedForm:
        module = ClosedForm(channels, num_outputs, length, names, sizes)
        module.input_mean.copy_(torch.from_numpy(scale.mean))
        module.input_std.copy_(torch.from_numpy(scale.std))
        return module

    if n == 1:  # nothing is left when it is left out
        module = scaled_module(views[:1])
        module.intercept.copy_(wanted[0])
        return ClosedFormFit(module, torch.zeros(1, num_outputs, dtype=torch.float32), {}, {})

    def loss(left_out: Tensor) -> float:
        if is_regression:
            errors = (left_out - wanted).square().mean(dim=-1)
            return float(errors.mean() if case_weights is None else errors @ case_weights / n)
        weight = _weight_of_one(left_out, targets, case_weights)
        return _log_loss(weight * left_out, targets, case_weights)

    def machine_of(cross: Tensor, square: Tensor) -> KernelLeastSquaresSVM:
        return kernel_least_squares_svm(
            cross, wanted, landmarks=None if len(places) == n else square,
            penalties=_PENALTIES, sample_weight=case_weights, loss=loss,
        )  # fmt: skip

    module = scaled_module(views, {name: size for name, size in whole.items() if name in views and size < 1})
    fitted = torch.cat(list(module.batches(sample)))
    kernels: dict[str, _Scaled] = {}
    machines: dict[str, KernelLeastSquaresSVM] = {}
    every: tuple[Tensor, Tensor] | None = None  # the sums of all kernels
    seconds_of_machine = 0.0
    # Of every view, the cases that its kernel has, beside those that it is fitted to.
    read = len(landmarks) + (0 if len(places) == n else n)
    for number, name in enumerate(views, start=1):
        if on_progress is not None:
            on_progress(f"closed form: {name}, view {number} of {len(views)}")
        given = fitted if name in _ELASTIC else fitted[:_FITTED_CASES]
        if deadline.is_set and kernels:
            # Behind it come its own machine and that of all views.
            left = deadline.left() - 2 * seconds_of_machine
            tried = fitted[: max(min(module.cases_at_once, _TIMED_CASES, n // _TIMED_PART), 1)]
            size = _largest_size(
                module.view(name), tried, len(landmarks), left / (_MARGIN * (read + len(given)))
            )
            if size is None:
                continue
            if size < 1:
                module.sizes[name] = size * whole.get(name, 1.0)
                module.views[name] = make_view(name, channels, length, module.sizes[name])
        module.view(name).fit(given, generator)
        others = None if len(places) == n else split.sequences
        kernels[name], cross, square = _kernel_of(module, name, landmarks, others)
        started = clock.now()
        machines[name] = machine_of(cross, square)
        seconds_of_machine = clock.now() - started
        if every is None:
            every = cross.double(), square.double()
        else:
            for total, part in zip(every, (cross, square), strict=True):
                total += part
    if on_progress is not None:
        on_progress(f"closed form: the machine of {len(kernels)} views of {n} cases")
    names = {name: [name] for name in kernels}
    if every is not None and len(kernels) > 1 and deadline.fits(seconds_of_machine):
        names["all"] = list(kernels)
        machines["all"] = machine_of(*every)
    scores = torch.stack([machine.left_out.double() for machine in machines.values()])
    weights = fit_weights(scores, wanted if is_regression else targets, case_weights)
    found = dict(zip(names, weights.tolist(), strict=True))
    used = [name for name in kernels if found[name] or found.get("all")]
    fitted_views = module.views
    sizes = {name: size for name, size in module.sizes.items() if name in used}
    module = scaled_module(used, sizes)
    module.views = nn.ModuleDict({name: fitted_views[name] for name in used})
    for weight, machine, members in zip(found.values(), machines.values(), names.values(), strict=True):
        if not weight:
            continue
        module.intercept += (weight * machine.intercept).float()
        for name in members:
            part = weight * kernels[name].rows.mT @ machine.coefficients.float()
            getattr(module, f"{name}_weight").add_(part * kernels[name].factor[:, None])
    for name in used:
        getattr(module, f"{name}_mean").copy_(kernels[name].mean)
    left_out = (weights[:, None, None] * scores).sum(dim=0).float()
    return ClosedFormFit(module.eval(), left_out, found, dict(zip(names, scores, strict=True)))


def _largest_size(view: View, series: Tensor, landmarks: int, seconds: float) -> float | None:
    """The first size of a view of size 1 that reads a case in so many seconds; None: none does.

    It is tried on a few series, and the products with the landmarks on a smaller matrix.
    """
    block = series.new_zeros(_PRODUCT, _PRODUCT)
    product = _seconds_of(lambda: block @ block) / _PRODUCT**3 * view.num_features * landmarks
    first = _seconds_of(lambda: view(series[:1]))  # which may have to wait for what is loaded once
    if _SIZES[-1] * first > _FIRST * seconds:
        return None
    reading = _seconds_of(lambda: view(series)) / len(series)
    return next((size for size in _SIZES if size * (reading + product) <= seconds), None)


def _seconds_of(work: Callable[[], Any]) -> float:
    started = clock.now()
    work()
    return clock.now() - started


class _Scaled(NamedTuple):
    """The scale of a view's features: (x - mean) * factor has the mean squared length 1."""

    mean: Tensor  # (F,)
    factor: Tensor  # (F,)
    rows: Tensor  # the features of the landmarks, (m, F)


def _kernel_of(
    module: ClosedForm, name: str, landmarks: list[np.ndarray], sequences: list[np.ndarray] | None
) -> tuple[_Scaled, Tensor, Tensor]:
    """The features of a view, and its kernel of all cases with the landmarks and of these, (n, m), (m, m).

    Without sequences, the landmarks are all the cases.
    """
    rows = torch.cat([module.features(name, series) for series in module.batches(landmarks)])
    deviation, mean = torch.std_mean(rows, dim=0, correction=0)
    if module.view(name).is_kernel:
        deviation = deviation.new_full(deviation.shape, float(deviation.square().mean().sqrt()))
    varies = (deviation > _SMALLEST_DEVIATION) & deviation.isfinite()
    factor = torch.where(varies, 1 / deviation.clamp_min(_SMALLEST_DEVIATION), 0.0)
    factor = factor / varies.sum().clamp_min(1).sqrt()
    scaled = _Scaled(mean, factor, rows.sub_(mean).mul_(factor))
    square = rows @ rows.mT
    if sequences is None:
        return scaled, square, square
    cross = torch.cat(
        [
            module.features(name, series).sub_(mean).mul_(factor) @ rows.mT
            for series in module.batches(sequences)
        ]
    )
    return scaled, cross, square


def fit_weights(scores: Tensor, targets: Tensor, case_weights: Tensor | None = None) -> Tensor:
    """Weights w_v >= 0 of predictors, which minimise the loss of sum_v w_v scores_v, (v,) float64.

    The loss is the log-loss of softmax for class indices, or the squared error for values. The sum of the
    weights, which is an inverse temperature, has a log-normal prior: where few cases are all right, it
    decides.

    Args:
        scores: (v, n, k) float64, of cases that did not train the predictors.
        targets: (n,) int64, or (n, k) values.
        case_weights: (n,); None: all 1.
    """
    is_regression = targets.is_floating_point()
    middle = 1.0 if is_regression else _START
    scores = scores.detach()
    with torch.enable_grad():
        logs = torch.full((len(scores),), middle / len(scores), dtype=torch.float64).log().requires_grad_()
        optimizer = torch.optim.LBFGS(
            [logs], lr=1.0, max_iter=50, tolerance_change=1e-7, line_search_fn="strong_wolfe"
        )

        def closure() -> Tensor:
            optimizer.zero_grad()
            weights = logs.exp()
            mixed = torch.tensordot(weights, scores, dims=1)
            if is_regression:
                losses = (mixed - targets).square().mean(dim=-1)
            else:
                losses = F.cross_entropy(mixed, targets, reduction="none")
            total = losses.sum() if case_weights is None else losses @ case_weights
            prior = ((weights.sum() / middle).log() / _PRIOR_DEVIATION).square() / 2
            total = total + prior
            total.backward()
            return total

        optimizer.step(closure)
    found = logs.detach().exp()
    return torch.where(found > 1e-4 * found.max(), found, 0.0)


def _weight_of_one(scores: Tensor, targets: Tensor, case_weights: Tensor | None) -> float:
    """The weight that ``fit_weights`` gives to a single predictor of classes, by Newton's method."""
    own = scores.gather(1, targets[:, None])[:, 0]
    counts = torch.ones_like(own) if case_weights is None else case_weights
    log = start = math.log(_START)
    for _ in range(_NEWTON_STEPS):
        weight = math.exp(log)
        shares = (weight * scores).softmax(dim=-1)
        mean = (shares * scores).sum(dim=-1)
        variance = (shares * scores.square()).sum(dim=-1) - mean.square()
        slope = weight * float(counts @ (mean - own)) + (log - start) / _PRIOR_DEVIATION**2
        # The curvature in the logarithm, without the part that may be negative.
        curve = weight**2 * float(counts @ variance) + 1 / _PRIOR_DEVIATION**2
        curve += max(weight * float(counts @ (mean - own)), 0.0)
        step = min(max(slope / curve, -1.0), 1.0)
        log -= step
        if abs(step) < _SMALLEST_STEP:
            break
    return math.exp(log)


def _log_loss(logits: Tensor, targets: Tensor, case_weights: Tensor | None) -> float:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return float(losses.mean() if case_weights is None else losses @ case_weights / len(targets))
