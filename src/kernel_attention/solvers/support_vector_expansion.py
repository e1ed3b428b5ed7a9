"""Support vector regression with the kernel of self-attention, whose expansion is an attention.

Source: Nguyen et al., "A Primal-Dual Framework for Transformers and Neural Networks", ICLR 2023 (theorem 1,
eq. 6 to 11).

With h(x) = sum_j exp(x.k_j / sqrt(p)), regression with the kernel exp(x.y / sqrt(p)) / (h(x) h(y)) predicts
y(x) = sum_j softmax_j(x.k_j / sqrt(p)) v_j + b with v_j = (alpha_j - alpha~_j) / h(k_j).

Legend: N keys and M queries of width p, d targets.
"""

from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, MultiOutputMixin, RegressorMixin
from sklearn.utils.validation import check_consistent_length, check_is_fitted
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention.containers import as_targets
from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import (
    fitted,
    give_back,
    read_array,
    read_matrix,
    require_finite,
    require_range,
    times_exp,
)
from kernel_attention.tensors.statistics import accumulation_dtype


class SupportVectors(NamedTuple):
    """A regression as an attention.

    ``values`` v_j, (N, d), zero at keys that are no support vectors; ``intercept`` b, (d,);
    ``dual_coefficients`` alpha_j - alpha~_j, (N, d); ``unit`` the mean of the kernel over its diagonal, which
    ``C`` is measured by, 0-dimensional; ``num_iterations`` libsvm's, the most of any target. For long keys
    (logits above 88 in float32, 709 in float64) ``unit`` may be 0 and ``dual_coefficients`` infinite where
    the values, their quotients by h, are finite.
    """

    values: Tensor
    intercept: Tensor
    dual_coefficients: Tensor
    unit: Tensor
    num_iterations: int


def support_vector_expansion(
    keys: Tensor, targets: Tensor, *, C: float = 1.0, epsilon: float = 0.1, tol: float = 1e-3,
    max_iter: int = -1,
) -> SupportVectors:  # fmt: skip
    """Fit one epsilon-insensitive regression for every column of the targets (scikit-learn's, on the CPU).

    The kernel's entries are about 1/N^2 and fall with the exponential of the keys' squared length, so a
    penalty for all data has to be relative: it is C over the mean of k(k_j, k_j) / h(k_j)^2. The logarithms
    of the kernel are normalised before anything is exponentiated. |alpha_j - alpha~_j| is at most C / unit.

    Args:
        keys: k_j, (N, p), N >= 2.
        targets: (N, d).
        C: the penalty in the unit above.
        epsilon: half the width of the tube in which errors cost nothing.
        tol: tolerance of libsvm's stopping criterion.
        max_iter: largest number of its iterations; -1: no limit.

    Raises:
        InputError: for keys or targets of other shapes or not finite, or a parameter out of range.
    """
    from sklearn.svm import SVR  # half a second, which no other solver needs to wait for

    _check(keys, targets, C, epsilon)
    exact = keys.detach().double().cpu()
    logits = exact @ exact.mT / exact.size(1) ** 0.5
    require_range("keys", "their products", logits)
    log_h = logits.logsumexp(dim=1)
    log_kernel = logits - log_h[:, None] - log_h
    log_unit = log_kernel.diagonal().logsumexp(0) - np.log(len(exact))
    kernel = (log_kernel - log_unit).exp().numpy()
    duals, intercepts, iterations = [], [], 0
    for column in targets.detach().double().cpu().numpy().T:
        model = SVR(kernel="precomputed", C=C, epsilon=epsilon, tol=tol, max_iter=max_iter)
        model.fit(kernel, column)
        dual = np.zeros(len(column))
        dual[model.support_] = model.dual_coef_[0]
        duals.append(dual)
        intercepts.append(float(model.intercept_[0]))
        iterations = max(iterations, int(np.max(model.n_iter_)))
    scaled = torch.from_numpy(np.stack(duals, axis=1))
    # alpha / h: either may leave the range of floating point where the quotient does not.
    values = times_exp(scaled, (-log_unit - log_h)[:, None])
    intercept = torch.tensor(intercepts, dtype=torch.float64, device="cpu")
    parts = (values, intercept, times_exp(scaled, -log_unit), log_unit.exp())
    dtype = accumulation_dtype(keys.dtype)
    values, intercept, coefficients, unit = (part.to(keys.device, dtype) for part in parts)
    require_range("keys", "the values of their regression", values)
    require_range("targets", "the intercepts of their regression", intercept)
    return SupportVectors(values, intercept, coefficients, unit, iterations)


def _check(keys: Tensor, targets: Tensor, C: float, epsilon: float) -> None:
    if keys.dim() != 2 or keys.size(0) < 2:
        raise InputError(f"keys has shape {tuple(keys.shape)}, expected (N, p) with N at least 2")
    if targets.dim() != 2 or targets.size(0) != keys.size(0) or targets.size(1) == 0:
        raise InputError(f"targets has shape {tuple(targets.shape)}, expected ({keys.size(0)}, d)")
    for name, x in (("keys", keys), ("targets", targets)):
        require_finite(name, x)
    if not C > 0:
        raise InputError(f"C={C!r} must be positive")
    if not epsilon >= 0:
        raise InputError(f"epsilon={epsilon!r} must be 0 or more")


class SupportVectorExpansion(MultiOutputMixin, RegressorMixin, BaseEstimator):
    """Support vector regression that predicts by softmax attention on its training data.

    Numpy or torch in, the same out; the regression itself runs on the CPU.

    Args:
        C: penalty, in units of 1 over the mean of the kernel's diagonal; see
            ``kernel_attention.solvers.support_vector_expansion``.
        epsilon: half the width of the tube in which errors cost nothing.
        tol: tolerance of libsvm's stopping criterion.
        max_iter: largest number of its iterations; -1: no limit.

    Attributes:
        keys_: the inputs fitted on, (N, p).
        values_: v_j, (N, d).
        intercept_: b, (d,).
        dual_coef_: alpha_j - alpha~_j, (N, d).
        n_iter_: libsvm's iterations, the most of any target.
        n_features_in_: p.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    def __init__(
        self, C: float = 1.0, *, epsilon: float = 0.1, tol: float = 1e-3, max_iter: int = -1
    ) -> None:
        self.C = C
        self.epsilon = epsilon
        self.tol = tol
        self.max_iter = max_iter

    def fit(self, X: Any, y: Any) -> Self:
        """Fit to inputs X (N, p) and targets y, (N, d) or (N,)."""
        if y is None:
            raise InputError("y=None: requires y to be passed, but the target y is None")
        keys = read_matrix(self, X, reset=True, min_samples=2)
        targets = _targets(y)
        check_consistent_length(keys, targets)
        self._one_column_ = targets.dim() == 1
        found = support_vector_expansion(
            keys, targets[:, None] if self._one_column_ else targets,
            C=self.C, epsilon=self.epsilon, tol=self.tol, max_iter=self.max_iter,
        )  # fmt: skip
        self.keys_ = give_back(keys, X)
        self.values_ = give_back(found.values, X)
        self.intercept_ = give_back(found.intercept, X)
        self.n_iter_ = found.num_iterations
        self.dual_coef_ = give_back(found.dual_coefficients, X)
        return self

    def attention(self, X: Any) -> Any:
        """Softmax attention of the queries X, (M, p), on ``keys_`` with ``values_``: (M, d)."""
        check_is_fitted(self)
        queries = read_matrix(self, X, reset=False)
        return give_back(self._attend(queries), X)

    def predict(self, X: Any) -> Any:
        """The regression at X, (M, p): attention plus ``intercept_``, (M, d), or (M,) if y was."""
        check_is_fitted(self)
        queries = read_matrix(self, X, reset=False)
        predicted = self._attend(queries) + fitted(self.intercept_, queries)
        return give_back(predicted[:, 0] if self._one_column_ else predicted, X)

    def _attend(self, queries: Tensor) -> Tensor:
        keys, values = (fitted(each, queries)[None, None] for each in (self.keys_, self.values_))
        attended = scaled_dot_product_attention(queries[None, None], keys, values)[0, 0]
        require_range("X", "its products with the keys", attended)
        return attended


def _targets(y: Any) -> Tensor:
    if isinstance(y, Tensor):
        return y.detach()
    return read_array("y", as_targets(y), ensure_2d=False).double()
