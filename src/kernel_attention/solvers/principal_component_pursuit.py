"""Principal Component Pursuit: a matrix as a low-rank one plus a sparse one, by convex optimisation.

Source: Candès, Li, Ma, Wright, "Robust Principal Component Analysis?", J. ACM 58(3), 2011 (eq. 1.1,
algorithm 1, sections 1.6 and 5). It is what Principal Attention Pursuit takes its steps from
(``kernel_attention.functional.principal_attention_pursuit``); that paper's appendix D prints the same
method with another sign of Y and another threshold.
"""

import math
import warnings
from typing import Any, NamedTuple, Self

import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import give_back, read_matrix, require_finite, require_range
from kernel_attention.tensors.statistics import accumulation_dtype, shrink

# Residuals are balanced at these iterations (Boyd et al. 2011, section 3.4.1). The method converges for any
# fixed step, so mu has to settle in the end.
_PERIOD, _LAST_CHANGE = 10, 2000


class Pursuit(NamedTuple):
    """The result of the iteration.

    ``low_rank`` L and ``sparse`` S, (m, n), have exact zeros, in the singular values and in the entries; M -
    L - S is what the tolerance leaves. ``dual`` Y, (m, n), is the multiplier of M = L + S. ``duality_gap`` is
    a proof of how good L is: the objective at L exceeds the smallest there is by at most this fraction of
    itself, whatever the iteration did.
    """

    low_rank: Tensor
    sparse: Tensor
    dual: Tensor
    num_iterations: int
    converged: bool
    duality_gap: float


def principal_component_pursuit(
    matrix: Tensor,
    lam: float | None = None,
    *,
    mu: float | None = None,
    mask: Tensor | None = None,
    tol: float = 1e-7,
    max_iter: int = 1000,
) -> Pursuit:
    """Minimise ||L||_* + lambda ||S||_1 over L + S = M, by the alternating direction method of multipliers.

    From L = Y = 0, until nothing moves::

        S <- shrink(M - L + Y/mu, lambda/mu)
        L <- D_{1/mu}(M - S + Y/mu)            D_t soft-thresholds the singular values
        Y <- Y + mu (M - L - S)

    It ends where ||M - L - S|| <= tol ||M|| and mu times the last change of L is at most tol ||Y|| (Frobenius
    norms): the first is the constraint, the second what Y lacks of being a subgradient of lambda ||S||_1.

    Args:
        matrix: M, (m, n).
        lam: lambda; None: 1 / sqrt(f max(m, n)), f the fraction of entries that ``mask`` keeps.
        mu: the step size, which changes the iteration and not its limit. None begins with entries / (4
            ||M||_1) and halves or doubles it where one of the two residuals falls behind the other; a number
            is kept.
        mask: (m, n), True = known. The others are free: L + S = M is asked for where M is known, and S is 0
            elsewhere (section 1.6).
        tol: see above; not less than 16 times the machine's precision.
        max_iter: largest number of iterations.

    Raises:
        InputError: for a matrix that is not two-dimensional and finite, another shape of ``mask``, or a
            parameter that is not positive.
    """
    data, known = _read(matrix, mask)
    _require_positive(lam=lam, mu=mu, tol=tol, max_iter=max_iter)
    # The problem scales with M, so entries of any size can be squared.
    unit = data.abs().max()
    if not unit > 0:
        return Pursuit(data, data, data, 0, True, 0.0)
    data = data / unit
    num_known = data.numel() if known is None else int(known.sum())
    if lam is None:
        lam = (num_known / data.numel() * max(data.shape)) ** -0.5
    adapts = mu is None
    mu = num_known / (4 * data.abs().sum().item()) if mu is None else mu * unit.item()
    # Where M is not known, S costs nothing and takes the rest of L.
    weight = torch.full_like(data, lam) if known is None else torch.where(known, lam, 0.0).to(data)
    tol = max(tol, 16 * torch.finfo(data.dtype).eps)
    size = torch.linalg.vector_norm(data)
    low_rank = dual = torch.zeros_like(data)
    iteration, converged = 0, False
    while not converged and iteration < max_iter:
        iteration += 1
        # The dual variable is kept as Y/mu, the only way in which it enters.
        sparse = shrink(data - low_rank + dual, weight / mu)
        previous, low_rank = low_rank, _threshold_singular_values(data - sparse + dual, 1 / mu)
        residual = data - low_rank - sparse
        dual = dual + residual
        left = (torch.linalg.vector_norm(residual) / size).item()
        change = torch.linalg.vector_norm(low_rank - previous).item()
        change = change / max(torch.linalg.vector_norm(dual).item(), torch.finfo(data.dtype).tiny)
        converged = max(left, change) <= tol
        if adapts and iteration % _PERIOD == 0 and iteration <= _LAST_CHANGE:
            factor = 2.0 if left > 5 * change else 0.5 if change > 5 * left else 1.0
            mu, dual = factor * mu, dual / factor
    gap = _duality_gap(data, low_rank, mu * dual, lam, known)
    if known is not None:
        sparse = torch.where(known, sparse, 0.0)
    low_rank, sparse = low_rank * unit, sparse * unit
    require_range("matrix", "its two parts", low_rank, sparse)
    return Pursuit(low_rank, sparse, mu * dual, iteration, converged, gap)


def _threshold_singular_values(x: Tensor, threshold: float) -> Tensor:
    """D_t(x): the proximal operator of t times the nuclear norm."""
    left, values, right = torch.linalg.svd(x, full_matrices=False)
    rank = int((values > threshold).sum())
    return (left[:, :rank] * (values[:rank] - threshold)) @ right[:rank]


def _duality_gap(data: Tensor, low_rank: Tensor, dual: Tensor, lam: float, known: Tensor | None) -> float:
    """(primal - dual) / primal at the feasible points next to L and Y.

    With S = M - L the pair is feasible, and so is Y once it is shrunk into ||Y||_2 <= 1, |Y_ij| <= lambda:
    the dual problem is to maximise <M, Y> over these.
    """
    missed = data - low_rank
    if known is not None:
        missed, dual = torch.where(known, missed, 0.0), torch.where(known, dual, 0.0)
    primal = torch.linalg.matrix_norm(low_rank, ord="nuc") + lam * missed.abs().sum()
    excess = max(1.0, torch.linalg.matrix_norm(dual, ord=2).item(), dual.abs().max().item() / lam)
    return ((primal - (data * dual).sum() / excess) / primal).item()


def _read(matrix: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """M in the precision of the iteration, 0 where it is not known, and where it is."""
    if matrix.dim() != 2 or matrix.numel() == 0:
        raise InputError(f"matrix has shape {tuple(matrix.shape)}, expected (m, n), not empty")
    if mask is not None:
        if mask.shape != matrix.shape or mask.dtype != torch.bool:
            raise InputError(
                f"mask has shape {tuple(mask.shape)} and type {mask.dtype}, expected {tuple(matrix.shape)} "
                "and torch.bool"
            )
        if not mask.any():
            raise InputError("mask keeps no entry of the matrix")
    data = matrix.detach().to(accumulation_dtype(matrix.dtype))
    if mask is not None:
        data = torch.where(mask, data, 0.0)
    require_finite("matrix (where it is known)", data)
    return data, None if mask is None or bool(mask.all()) else mask


def _require_positive(**numbers: float | None) -> None:
    for name, value in numbers.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{name}={value!r} must be a positive number")


class PrincipalComponentPursuit(BaseEstimator):
    """Robust PCA of one matrix: low rank plus sparse. Numpy or torch in, the same out.

    NaN, a mask or ``pd.NA`` marks a missing entry: ``low_rank_`` fills it in. A
    ``sklearn.exceptions.ConvergenceWarning`` says where ``max_iter`` ends the iteration.

    Args:
        lam: lambda; None: 1 / sqrt(f max(m, n)) with f the fraction of entries that are there.
        mu: step size; None begins with entries / (4 ||M||_1) and balances the residuals.
        tol: relative size of the constraint's and the dual residual at the end.
        max_iter: largest number of iterations.

    Attributes:
        low_rank_: L, (m, n).
        sparse_: S, (m, n).
        dual_: Y, (m, n).
        duality_gap_: the largest fraction by which the objective could still fall.
        n_iter_: iterations done.
        n_features_in_: n.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    def __init__(
        self, lam: float | None = None, *, mu: float | None = None, tol: float = 1e-7, max_iter: int = 1000
    ) -> None:
        self.lam = lam
        self.mu = mu
        self.tol = tol
        self.max_iter = max_iter

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = True
        return tags

    def fit(self, X: Any, y: Any = None) -> Self:
        """Decompose the matrix X, (m, n). ``y`` is ignored."""
        matrix = read_matrix(self, X, reset=True, allow_nan=True)
        found = principal_component_pursuit(
            matrix, self.lam, mu=self.mu, mask=~matrix.isnan(), tol=self.tol, max_iter=self.max_iter
        )
        if not found.converged:
            warnings.warn(
                f"max_iter={self.max_iter} ended the pursuit: its duality gap is {found.duality_gap:.1e}",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.low_rank_ = give_back(found.low_rank, X)
        self.sparse_ = give_back(found.sparse, X)
        self.dual_ = give_back(found.dual, X)
        self.duality_gap_ = found.duality_gap
        self.n_iter_ = found.num_iterations
        return self
