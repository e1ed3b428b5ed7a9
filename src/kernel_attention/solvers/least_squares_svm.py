"""The least-squares support vector machine, linear or of a kernel, and its leave-one-out predictions, also
of several machines added up.

Sources: Suykens, Vandewalle, "Least squares support vector machine classifiers", Neural Processing Letters
1999; Cawley, Talbot, "Fast exact leave-one-out cross-validation of sparse least-squares support vector
machines", Neural Networks 2004.

Legend: n cases, F features, k targets, m landmarks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import require_finite, require_range

PENALTIES = tuple(10.0 ** (exponent / 2) for exponent in range(-1, -14, -1))
"""0.3 to 3e-7, half a decade apart."""

_ROWS = 1024  # that the primal reads at once
_RESOLVED = 1e-7  # of the largest eigenvalue of the landmarks' kernel matrix: smaller ones are rounding
_START = 3.0  # sum of the weights; outputs of -1 and 1 become log-odds of 6
_PRIOR_DEVIATION = 0.5  # of the logarithm of that sum
_EVENNESS = 0.3  # of the prior of the shares


class LeastSquaresSVM(NamedTuple):
    """The regression f(x) = W^T x + b.

    ``weight`` W, (F, k); ``intercept`` b, (k,); ``penalty``, the chosen one; ``left_out``, (n, k): the
    prediction for every training case by the machine that is trained without it.
    """

    weight: Tensor
    intercept: Tensor
    penalty: float
    left_out: Tensor


class KernelLeastSquaresSVM(NamedTuple):
    """The regression f(x) = sum_j k(x, x_j) A_j + b over the landmarks x_j.

    ``coefficients`` A, (m, k); ``intercept`` b, (k,); ``penalty``, the chosen one; ``left_out``, (n, k).
    """

    coefficients: Tensor
    intercept: Tensor
    penalty: float
    left_out: Tensor


def least_squares_svm(
    features: Tensor,
    targets: Tensor,
    *,
    penalties: Sequence[float] = PENALTIES,
    sample_weight: Tensor | None = None,
) -> LeastSquaresSVM:
    """Minimise lambda ||W||^2 + sum_i w_i ||y_i - W^T x_i - b||^2; leave-one-out errors choose lambda.

    A classifier has targets of -1 and 1, a column for every class. A penalty is relative: lambda is the
    penalty times the mean of w_i ||x_i||^2 over the cases, of centred features. Suykens's gamma is its
    inverse. One eigendecomposition serves all penalties and all left-out cases: of the kernel matrix (n, n),
    the dual, or, of more cases than features, of their Gram matrix (F, F), the primal. It is in float64, and
    takes the time of n F min(n, F) products and the memory of n F numbers.

    Args:
        features: x_i, (n, F), n >= 2.
        targets: y_i, (n, k).
        penalties: those that are tried, all above 0. The one with the smallest sum of weighted squared
            leave-one-out errors is chosen, the first of equals.
        sample_weight: w_i, (n,), above 0; None: all 1.

    Raises:
        InputError: for arguments of other shapes, not finite, or out of range.
    """
    _check(features, targets, penalties, sample_weight)
    x, y = features.detach(), targets.detach().double()
    weights = y.new_ones(len(y)) if sample_weight is None else sample_weight.detach().to(y)
    share, root = weights / weights.sum(), weights.sqrt()[:, None]
    # Features are read in parts: in float64 they may be too large for a second copy.
    parts = [slice(start, start + _ROWS) for start in range(0, len(x), _ROWS)]
    x_mean = torch.stack([share[part] @ x[part].double() for part in parts]).sum(dim=0)
    y_mean = share @ y
    wanted = root * (y - y_mean)

    def centred(part: slice) -> Tensor:
        return root[part] * (x[part].double() - x_mean)

    if in_dual := len(x) <= x.size(1):
        rows = centred(slice(None))
        squares, vectors = _eigen(rows @ rows.mT)
        coordinates = vectors * squares.sqrt()
    else:
        gram = x_mean.new_zeros(x.size(1), x.size(1))
        for part in parts:
            gram += centred(part).mT @ centred(part)
        squares, vectors = _eigen(gram)
        coordinates = torch.cat([centred(part) @ vectors for part in parts])
    # In these coordinates, centred cases as rows, the features are orthogonal with the lengths ``squares``.
    unit = squares.sum() / len(x) if squares.any() else 1.0
    moments = coordinates.mT @ wanted
    penalty, left_out = _chosen(coordinates, squares, unit, wanted, y, share, root, penalties)
    inverse = 1 / (squares + penalty * unit)[:, None]
    if in_dual:
        weight = rows.mT @ (vectors @ (inverse * (vectors.mT @ wanted)))
    else:
        weight = vectors @ (inverse * moments)
    intercept = y_mean - x_mean @ weight
    require_range("features", "the weights of their regression", weight, intercept, left_out)
    weight, intercept, left_out = (part.to(x.dtype) for part in (weight, intercept, left_out))
    return LeastSquaresSVM(weight, intercept, penalty, left_out)


def kernel_least_squares_svm(
    kernel: Tensor,
    targets: Tensor,
    *,
    landmarks: Tensor | None = None,
    penalties: Sequence[float] = PENALTIES,
    sample_weight: Tensor | None = None,
) -> KernelLeastSquaresSVM:
    """The machine of ``least_squares_svm`` on the features of a kernel, from the kernel matrix alone.

    Args:
        kernel: k(x_i, x_j), (n, n); with ``landmarks``, of the cases with the landmarks, (n, m).
        targets: y_i, (n, k).
        landmarks: the kernel matrix of the landmarks, (m, m). The machine is then that of Nystrom's features
            (Williams & Seeger 2001), in time linear in n. None: every case is a landmark.
        penalties: as in ``least_squares_svm``.
        sample_weight: as in ``least_squares_svm``.

    Raises:
        InputError: for arguments of other shapes, not finite, or out of range.
    """
    _check(kernel, targets, penalties, sample_weight)
    square = kernel if landmarks is None else landmarks
    if square.shape != (kernel.size(1), kernel.size(1)):
        name = "kernel" if landmarks is None else "landmarks"
        expected = (len(kernel),) * 2 if landmarks is None else (kernel.size(1),) * 2
        raise InputError(f"{name} has shape {tuple(square.shape)}, expected {expected}")
    if landmarks is not None:
        values, vectors = _eigen(landmarks.detach().double())
        kept = values > _RESOLVED * values[-1]
        whitened = vectors[:, kept] / values[kept].sqrt()
        if not kept.any():
            whitened = torch.zeros_like(vectors[:, :1])
        machine = least_squares_svm(
            kernel.double() @ whitened, targets, penalties=penalties, sample_weight=sample_weight
        )
        return KernelLeastSquaresSVM(
            whitened @ machine.weight, machine.intercept, machine.penalty, machine.left_out
        )
    matrix, y = kernel.detach().double(), targets.detach().double()
    weights = y.new_ones(len(y)) if sample_weight is None else sample_weight.detach().to(y)
    share, root = weights / weights.sum(), weights.sqrt()[:, None]
    y_mean = share @ y
    wanted = root * (y - y_mean)
    mean = matrix @ share
    squares, vectors = _eigen(root * (matrix - mean - mean[:, None] + share @ mean) * root.mT)
    unit = squares.sum() / len(y) if squares.any() else 1.0
    coordinates = vectors * squares.sqrt()
    penalty, left_out = _chosen(coordinates, squares, unit, wanted, y, share, root, penalties)
    inverse = 1 / (squares + penalty * unit)[:, None]
    dual = root * (vectors @ (inverse * (vectors.mT @ wanted)))
    coefficients = dual - share[:, None] * dual.sum(dim=0)
    intercept = y_mean - mean @ coefficients
    require_range("kernel", "the coefficients of its machine", coefficients, intercept, left_out)
    return KernelLeastSquaresSVM(coefficients, intercept, penalty, left_out)


def fit_weights(scores: Tensor, targets: Tensor, case_weights: Tensor | None = None) -> Tensor:
    """Weights w_v >= 0 of predictors, which minimise the loss of sum_v w_v scores_v, (v,) float64.

    The loss is the log-loss of softmax for class indices, or the squared error for values, summed over the
    cases. Where they are few, priors decide: a log-normal one of the sum of the weights, which is an inverse
    temperature, and a Dirichlet one of the shares in it, which makes them more even.

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
            total = total + prior - _EVENNESS * logs.log_softmax(dim=0).sum()
            total.backward()
            return total

        optimizer.step(closure)
    found = logs.detach().exp()
    return torch.where(found > 1e-4 * found.max(), found, 0.0)


def _chosen(
    coordinates: Tensor,
    squares: Tensor,
    unit: Tensor | float,
    wanted: Tensor,
    y: Tensor,
    share: Tensor,
    root: Tensor,
    penalties: Sequence[float],
) -> tuple[float, Tensor]:
    """The penalty of the smallest leave-one-out errors, and the predictions for left-out cases at it."""
    moments = coordinates.mT @ wanted
    leverages = coordinates.square()
    best: tuple[float, float, Tensor] | None = None
    for penalty in penalties:
        inverse = 1 / (squares + penalty * unit)
        # A left-out case errs by its residual over one minus its leverage (Cawley & Talbot, eq. 8).
        residual = wanted - coordinates @ (inverse[:, None] * moments)
        residual /= (1 - share - leverages @ inverse)[:, None]
        error = float(residual.square().sum())
        if best is None or error < best[0]:
            best = error, penalty, y - residual / root
    assert best is not None
    return best[1], best[2]


def _eigen(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues and eigenvectors of a Gram matrix; what rounding makes of an eigenvalue of zero is zero."""
    require_range("features", "their products", matrix)
    values, vectors = torch.linalg.eigh(matrix)
    smallest = len(matrix) * torch.finfo(matrix.dtype).eps * values[-1]
    return values.masked_fill(values <= smallest, 0.0), vectors


def _check(
    features: Tensor, targets: Tensor, penalties: Sequence[float], sample_weight: Tensor | None
) -> None:
    if features.dim() != 2 or len(features) < 2 or features.size(1) == 0:
        raise InputError(f"features has shape {tuple(features.shape)}, expected (n, F) with n at least 2")
    if targets.dim() != 2 or len(targets) != len(features) or targets.size(1) == 0:
        raise InputError(f"targets has shape {tuple(targets.shape)}, expected ({len(features)}, k)")
    for name, values in (("features", features), ("targets", targets)):
        require_finite(name, values)
    if not penalties or not all(0 < penalty < float("inf") for penalty in penalties):
        raise InputError(f"penalties={penalties!r} must be one or more finite numbers above 0")
    if sample_weight is None:
        return
    if sample_weight.shape != (len(features),):
        raise InputError(f"sample_weight has shape {tuple(sample_weight.shape)}, expected ({len(features)},)")
    if not (sample_weight.isfinite().all() and (sample_weight > 0).all()):
        raise InputError("sample_weight must be finite and above 0 for every case")
