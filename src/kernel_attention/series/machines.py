"""The fit of a closed form: least-squares SVMs on views of series, stacked by leave-one-out predictions.

Legend: n cases, c channels, n_i steps of case i, N steps that a view is made for, F features, k outputs, m
landmarks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernel_attention import limits as clock
from kernel_attention.limits import Deadline
from kernel_attention.series.closed_form import (
    ELASTIC,
    MOST_STEPS,
    VIEWS,
    VIEWS_OF_LENGTHS,
    ClosedForm,
    make_view,
)
from kernel_attention.series.elastic import MOST_REFERENCES
from kernel_attention.series.splits import SequenceSplit, Standardizer
from kernel_attention.series.views import View
from kernel_attention.solvers.least_squares_svm import (
    KernelLeastSquaresSVM,
    fit_weights,
    kernel_least_squares_svm,
)

MOST_LANDMARKS = 1024
"""Cases up to which the machines are exact; of more, these many carry the kernel."""

_PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(3, -11, -1))
_MOST_ELASTIC = 512  # cases: of more, the other views know enough
_FITTED_CASES = 64  # that give thresholds
_TIMED_CASES = 8
_TIMED_PART = 32  # of all cases, at most one of so many is timed
_FIRST = 4.0  # how much slower the first may be
_SIZES = (1.0, 0.5, 0.25, 0.125)  # of a view, the first that fits into the time
_PRODUCT = 384  # rows and columns of a matrix whose square is timed
_MARGIN = 1.2  # on what work is expected to take
_SMALLEST_DEVIATION = 1e-6  # of a feature


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
    views: Sequence[str] | None = None,
    max_seconds: float | None = None,
    on_progress: Callable[[str], None] | None = None,
) -> ClosedFormFit:
    """Fit a least-squares SVM on every view and one on all of them, and stack them.

    A kernel is the linear one of standardised features. The penalty of a machine is the one with the smallest
    squared error of left-out cases. The machines' weights are those of ``fit_weights`` for their predictions
    for left-out cases. Beyond 1,024 cases, a random choice of so many are the landmarks of Nystrom's
    features, so that time and memory grow linearly with n.

    Args:
        split: the training cases. Where their lengths differ, the views read each at its own pace.
        num_outputs: k; classes have targets of -1 and 1.
        max_len: steps of the longest series; views read at most ``MOST_STEPS`` of them.
        is_regression: whether the targets are values.
        seed: of the random views and landmarks.
        views: names in ``VIEWS_OF_LENGTHS``; None: all that serve. The elastic ones are left out beyond 512
            cases.
        max_seconds: a view that would pass this time has fewer kernels or is left out, except for the first.
        on_progress: called with a line of text before every view.
    """
    deadline = Deadline(max_seconds)
    say = on_progress or (lambda line: None)
    n = len(split)
    if views is None:
        views = VIEWS if len(set(map(len, split.sequences))) == 1 else VIEWS_OF_LENGTHS
    if n > _MOST_ELASTIC:
        views = [name for name in views if name not in ELASTIC]
    objective = _Objective.of(split, num_outputs, is_regression)
    machines = _Machines(split, views, objective, max_len, seed, deadline)
    if n == 1:  # nothing is left when it is left out
        module = machines.module_of(views[:1])
        module.intercept.copy_(objective.wanted[0])
        return ClosedFormFit(module, torch.zeros(1, num_outputs, dtype=torch.float32), {}, {})
    for number, name in enumerate(views, start=1):
        say(f"closed form: {name}, view {number} of {len(views)}")
        machines.add(name)
    say(f"closed form: the machine of {len(machines.kernels)} views of {n} cases")
    machines.add_all()
    return machines.stacked()


class _Objective(NamedTuple):
    """The answers that the machines are to give."""

    targets: Tensor  # class indices (n,) int64, or ``wanted``
    wanted: Tensor  # (n, k) float64
    weights: Tensor | None  # of the cases, (n,) float64

    @classmethod
    def of(cls, split: SequenceSplit, num_outputs: int, is_regression: bool) -> _Objective:
        targets = torch.as_tensor(split.targets)
        wanted = targets.double().reshape(len(split), -1)
        if is_regression:
            targets = wanted
        else:
            wanted = 2.0 * F.one_hot(targets, num_outputs).double() - 1
        weights = None if split.weights is None else torch.as_tensor(split.weights).double()
        return cls(targets, wanted, weights)


class _Scaled(NamedTuple):
    """The scale of a view's features: (x - mean) * factor has the mean squared length 1."""

    mean: Tensor  # (F,)
    factor: Tensor  # (F,)
    rows: Tensor  # the features of the landmarks, (m, F)


class _Machines:
    """The machines on the kernels of views, which are added one by one.

    Args:
        split: the training cases.
        views: names of the views that may be added.
        objective: of the machines.
        max_len: steps of the longest series.
        seed: of the random views and landmarks.
        deadline: a view that would pass it is made smaller or left out.
    """

    def __init__(
        self,
        split: SequenceSplit,
        views: Sequence[str],
        objective: _Objective,
        max_len: int,
        seed: int,
        deadline: Deadline,
    ) -> None:
        self.objective, self.deadline = objective, deadline
        self.scale = Standardizer.fit(split.sequences)
        n, lengths = len(split), sorted(map(len, split.sequences))
        self.length, self.rate = min(max_len, MOST_STEPS), None
        if lengths[0] < lengths[-1]:
            self.rate = self.length / max_len
            self.length = max(round(self.rate * lengths[n // 2]), 1)
        self.generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(n, generator=self.generator)
        self.others: list[np.ndarray] | None = None  # cases, where the landmarks are not all of them
        self.landmarks = split.sequences
        if n > MOST_LANDMARKS:
            places = order[:MOST_LANDMARKS].sort().values.tolist()
            self.landmarks, self.others = [split.sequences[place] for place in places], split.sequences
        # Of fewer cases than references, elastic views have a part.
        part = min(n / MOST_REFERENCES, 1.0)
        self.sizes = {name: part for name in views if name in ELASTIC and part < 1}
        self.module = self.module_of(views, self.sizes)
        self.sample = [split.sequences[place] for place in order[:MOST_REFERENCES].tolist()]
        self.kernels: dict[str, _Scaled] = {}
        self.machines: dict[str, KernelLeastSquaresSVM] = {}
        self.total: tuple[Tensor, ...] = ()  # the sums of the kernels, float64
        self.seconds_of_machine = 0.0

    def module_of(self, views: Sequence[str], sizes: dict[str, float] | None = None) -> ClosedForm:
        """A module of these views, of weight 0."""
        channels, outputs = len(self.scale.mean), self.objective.wanted.size(1)
        module = ClosedForm(channels, outputs, self.length, views, sizes, self.rate)
        module.input_mean.copy_(torch.from_numpy(self.scale.mean))
        module.input_std.copy_(torch.from_numpy(self.scale.std))
        return module

    def add(self, name: str) -> None:
        """Add a view and the machine on its kernel, as far as the time allows."""
        fitted = self.sample if name in ELASTIC else self.sample[:_FITTED_CASES]
        if self.deadline.is_set and self.kernels and not self._makes_fit(name, len(fitted)):
            return
        series = [batch for _, batch in self.module.batches(fitted, len(fitted))]
        self.module.view(name).fit(series, self.generator)
        self.kernels[name], *kernel = self._kernel(name)
        started = clock.now()
        self.machines[name] = self._machine(*kernel)
        self.seconds_of_machine = clock.now() - started
        if not self.total:
            self.total = tuple(part.double() for part in kernel)
            return
        for total, part in zip(self.total, kernel, strict=True):
            total += part

    def add_all(self) -> None:
        """Add the machine on the sum of all kernels, as far as the time allows."""
        if len(self.kernels) > 1 and self.deadline.fits(self.seconds_of_machine):
            self.machines["all"] = self._machine(*self.total)

    def stacked(self) -> ClosedFormFit:
        """The weighted sum of the machines as a linear map of the features."""
        scores = {name: machine.left_out.double() for name, machine in self.machines.items()}
        together = torch.stack(list(scores.values()))
        weights = fit_weights(together, self.objective.targets, self.objective.weights)
        found = dict(zip(scores, weights.tolist(), strict=True))
        used = [name for name in self.kernels if found[name] or found.get("all")]
        sizes = {name: size for name, size in self.module.sizes.items() if name in used}
        module = self.module_of(used, sizes)
        module.views = nn.ModuleDict({name: self.module.view(name) for name in used})
        for name, machine in self.machines.items():
            if not found[name]:
                continue
            module.intercept += (found[name] * machine.intercept).float()
            for member in self.kernels if name == "all" else [name]:
                kernel = self.kernels[member]
                part = found[name] * kernel.rows.mT @ machine.coefficients.float()
                getattr(module, f"{member}_weight").add_(part * kernel.factor[:, None])
        for name in used:
            getattr(module, f"{name}_mean").copy_(self.kernels[name].mean)
        left_out = (weights[:, None, None] * together).sum(dim=0).float()
        return ClosedFormFit(module.eval(), left_out, found, scores)

    def _makes_fit(self, name: str, fitted: int) -> bool:
        """Make a view as small as the time asks for; False where there is none so small."""
        # Of every view, the cases that its kernel has, beside those that it is fitted to.
        read = len(self.landmarks) + len(self.others or ()) + fitted
        # Behind it come its own machine and that of all views.
        left = self.deadline.left() - 2 * self.seconds_of_machine
        count = max(min(_TIMED_CASES, len(self.objective.targets) // _TIMED_PART), 1)
        by_length = sorted(self.sample, key=len, reverse=True)
        tried = [batch for _, batch in self.module.batches(by_length[:: -(-len(by_length) // count)])]
        size = _largest_size(self.module.view(name), tried, len(self.landmarks), left / (_MARGIN * read))
        if size is None:
            return False
        if size < 1:
            size *= self.sizes.get(name, 1.0)
            self.module.sizes[name] = size
            self.module.views[name] = make_view(name, len(self.scale.mean), self.length, size)
        return True

    def _kernel(self, name: str) -> tuple[Any, ...]:
        """The scale of a view, and its kernel, (n, n); of landmarks, (n, m) and that of these, (m, m)."""
        rows = self.module.rows(name, self.landmarks)
        deviation, mean = torch.std_mean(rows, dim=0, correction=0)
        if self.module.view(name).is_kernel:
            deviation = deviation.new_full(deviation.shape, float(deviation.square().mean().sqrt()))
        varies = (deviation > _SMALLEST_DEVIATION) & deviation.isfinite()
        factor = torch.where(varies, 1 / deviation.clamp_min(_SMALLEST_DEVIATION), 0.0)
        factor = factor / varies.sum().clamp_min(1).sqrt()
        scaled = _Scaled(mean, factor, rows.sub_(mean).mul_(factor))
        square = rows @ rows.mT
        if self.others is None:
            return scaled, square
        cross = square.new_empty(len(self.others), len(rows))
        for places, series in self.module.batches(self.others):
            cross[places] = self.module.features(name, series).sub_(mean).mul_(factor) @ rows.mT
        return scaled, cross, square

    def _machine(self, kernel: Tensor, landmarks: Tensor | None = None) -> KernelLeastSquaresSVM:
        return kernel_least_squares_svm(
            kernel, self.objective.wanted, landmarks=landmarks, penalties=_PENALTIES,
            sample_weight=self.objective.weights,
        )  # fmt: skip


def _largest_size(view: View, series: Sequence[Tensor], landmarks: int, seconds: float) -> float | None:
    """The first size of a view of size 1 that reads a case in so many seconds; None: none does.

    It is tried on a few series, and the products with the landmarks on a smaller matrix.
    """
    block = series[0].new_zeros(_PRODUCT, _PRODUCT)
    product = _seconds_of(lambda: block @ block) / _PRODUCT**3 * view.num_features * landmarks
    first = _seconds_of(lambda: view(series[0][:1]))  # which may have to wait for what is loaded once
    if _SIZES[-1] * first > _FIRST * seconds:
        return None
    reading = _seconds_of(lambda: [view(batch) for batch in series]) / sum(map(len, series))
    return next((size for size in _SIZES if size * (reading + product) <= seconds), None)


def _seconds_of(work: Callable[[], Any]) -> float:
    started = clock.now()
    work()
    return clock.now() - started
