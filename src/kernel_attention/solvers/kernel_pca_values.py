"""Kernel PCA of self-attention: the values it predicts for a layer.

Source: Teo, Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component
Analysis", NeurIPS 2024 (theorem 1, remark 1, eq. 11).

With k(x, y) = exp(x.y / sqrt(p)) and g(x) = sum_j k(x, k_j) the kernel is k_phi(x, y) = k(x, y)/(g(x) g(y)).

Legend: N keys of width p, d components; ``...`` leading dimensions (batch, heads), which all arguments share
or broadcast to. Everything is computed in float64, with logits kept as logits until their common size is out,
and returned in the precision of the keys (float32 or better).
"""

import math
from typing import Any, NamedTuple, Self

import torch
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from kernel_attention.errors import InputError
from kernel_attention.solvers.arrays import (
    fitted,
    give_back,
    read_matrix,
    require_finite,
    require_range,
    times_exp,
)
from kernel_attention.tensors.multilinear.unfoldings import leading_eigenvectors
from kernel_attention.tensors.statistics import accumulation_dtype


class KernelPCAResult(NamedTuple):
    """The principal components of a set of keys, the largest first.

    ``values`` (..., N, d) are v_dj, what theorem 1 predicts as a layer's value matrix; ``coefficients``
    (..., N, d) the dual a_dj, eigenvectors of the centred Gram matrix K~ with N lambda a.a = 1, infinite
    where lambda leaves the range; ``eigenvalues`` (..., d) are lambda, those of K~ / N, and
    ``log_eigenvalues`` their logarithms, which do not underflow; ``log_normalizer`` (..., N) is log g(k_j). A
    component that the keys do not have (its eigenvalue is rounding error, ``gram_rounding``) is zero
    throughout.
    """

    values: Tensor
    coefficients: Tensor
    eigenvalues: Tensor
    log_eigenvalues: Tensor
    log_normalizer: Tensor


class CentredGram(NamedTuple):
    """K~ = exp(log_scale) ``centred``, (..., N, N), the largest entry of K_phi being exp(log_scale).

    ``rounding`` (...) bounds the 2-norm of what floating point adds to ``centred``: ``gram_rounding``.
    """

    centred: Tensor
    log_scale: Tensor
    log_normalizer: Tensor
    real: Tensor
    num_keys: Tensor
    rounding: Tensor


def kernel_pca_values(
    keys: Tensor, n_components: int | None = None, *, attention_mask: Tensor | None = None
) -> KernelPCAResult:
    """The value matrix that kernel PCA predicts for a layer with these keys (theorem 1).

    v_dj = a_dj / g(k_j) - (1/N) sum_j' a_dj' / g(k_j): softmax attention of any queries on the keys, with
    these values, gives the projections of phi(q) on the first d principal axes of the centred phi(k_j). The
    sum is 0, as K~ has the constants in its kernel. The signs are deterministic: the entry of a_d of largest
    size is positive. g is at least 1, so no eigenvalue exceeds 1/N.

    Args:
        keys: (..., N, p).
        n_components: d, at most N; None: p, or N where that is less.
        attention_mask: broadcast to (..., N), True = real key; the others count for nothing and have value
            0.

    Raises:
        InputError: for keys of fewer than two dimensions or not finite, or another n_components.
    """
    gram = centred_gram(keys, attention_mask)
    rank = _rank(n_components, keys)
    vectors = leading_eigenvectors(gram.centred, rank)
    scaled = ((gram.centred @ vectors) * vectors).sum(-2)
    exists = scaled > gram.rounding[..., None]
    # exp(log_scale) is an eigenvalue's size: the root of its inverse may overflow where its product with 1/g
    # does not.
    directions = torch.where(exists, scaled, 1.0).rsqrt()[..., None, :] * vectors * exists[..., None, :]
    half = (gram.log_scale / 2)[..., None, None]
    normalizer = gram.log_normalizer[..., None]
    values = directions * (-normalizer - half).exp() * gram.real[..., None]
    log_eigenvalues = scaled.clamp_min(0.0).log() + (gram.log_scale - gram.num_keys.log())[..., None]
    log_eigenvalues = log_eigenvalues.masked_fill(~exists, -math.inf)
    coefficients = times_exp(directions, -half)
    parts = (values, coefficients, log_eigenvalues.exp(), log_eigenvalues, gram.log_normalizer)
    found = KernelPCAResult(*(part.to(accumulation_dtype(keys.dtype)) for part in parts))
    require_range("keys", "the logarithms of their normalisers", found.log_normalizer)
    return found


def centred_gram(keys: Tensor, attention_mask: Tensor | None) -> CentredGram:
    """K~ of the keys (remark 1), zero at padded keys; the arguments of ``kernel_pca_values``."""
    require_matrix("keys", keys)
    real = torch.ones(keys.shape[:-1], dtype=torch.bool, device=keys.device)
    if attention_mask is not None:
        real = real & attention_mask
    # Padding may hold any value, also NaN.
    exact = double(keys).masked_fill(~real[..., None], 0.0)
    require_finite("keys", exact)
    pairs = real[..., :, None] & real[..., None, :]
    logits = keys.size(-1) ** -0.5 * exact @ exact.mT
    require_range("keys", "their products", 6 * logits)  # 6: what is subtracted from them below
    largest = logits.diagonal(dim1=-2, dim2=-1).amax(-1)
    logits = logits.masked_fill(~pairs, -math.inf)
    log_normalizer = logits.logsumexp(-1).masked_fill(~real, 0.0)
    logits = logits - log_normalizer[..., :, None] - log_normalizer[..., None, :]
    log_scale = logits.amax((-2, -1)).nan_to_num(neginf=0.0)  # no keys at all
    kernel = (logits - log_scale[..., None, None]).exp()
    count = real.sum(-1).clamp_min(1).to(exact.dtype)
    mean = kernel.sum(-1) / count[..., None]
    centred = kernel - mean[..., :, None] - mean[..., None, :] + (mean.sum(-1) / count)[..., None, None]
    centred = centred.masked_fill(~pairs, 0.0)
    rounding = gram_rounding(keys.size(-1), count, largest, kernel.sum(-1).amax(-1))
    return CentredGram((centred + centred.mT) / 2, log_scale, log_normalizer, real, count, rounding)


def gram_rounding(width: int, num_keys: Tensor, largest: Tensor, row_sum: Tensor) -> Tensor:
    """A bound on the rounding error of the centred Gram matrix and of its eigenvalues, in the 2-norm.

    With M the largest k.k / sqrt(p), which no |logit| exceeds, s the largest row sum of K_phi (entries up to
    1), u = eps / 2 the unit of rounding, and first order in u throughout:

    * a logit, a scaled product of p terms, is off by (p + 2) u M at most;
    * log g, at most M + log N, is off by that, by (N + 2) u for its sum and by u (M + log N) for itself;
    * the exponent of an entry of K_phi, a logit less two log g, is off by three times the first, twice the
      rest of the second, and by the roundings of its differences, u (5 M + 3 log N): together by less than
      3 u ((p + 5) M + N + 3), and exp makes of this a relative error of the entry;
    * an error relative to entries at least 0 has a 2-norm of at most that times s;
    * centring sums N entries three times and rounds the differences, at most 3 (N + 4) u s;
    * the eigenvectors and the Rayleigh quotients, sums of N^2 terms: at most 9 N u s.

    The sum is below eps s (2 (p + 5) M + 8 (N + 3)). So equal keys have no component at any length, though
    exp turns the rounding of their logits into differences that grow with M.

    Args:
        width: p.
        num_keys: N, (...).
        largest: M, (...).
        row_sum: s, (...).
    """
    eps = torch.finfo(row_sum.dtype).eps
    return eps * row_sum * (2 * (width + 5) * largest + 8 * (num_keys + 3))


def double(x: Tensor) -> Tensor:
    """The tensor in float64, or in the best precision that its device has."""
    return x.to(torch.float32 if x.device.type == "mps" else torch.float64)


def _rank(n_components: int | None, keys: Tensor) -> int:
    count = keys.size(-2)
    if n_components is None:
        return min(keys.size(-1), count)
    if not 1 <= n_components <= count:
        raise InputError(f"n_components={n_components!r} must be from 1 to {count}, the number of keys")
    return n_components


def require_matrix(name: str, x: Tensor) -> None:
    """InputError where x has fewer than two dimensions."""
    if x.dim() < 2:
        raise InputError(f"{name} has shape {tuple(x.shape)}, expected (..., N, p)")


def require_values(values: Tensor, keys: Tensor) -> None:
    """InputError where the values have no row for every key."""
    if values.dim() < 2 or values.size(-2) != keys.size(-2):
        raise InputError(
            f"values has shape {tuple(values.shape)}, expected (..., {keys.size(-2)}, d), a row for every key"
        )


def counted(name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """x in double precision, 0 where it does not count, because padding may hold any value, also NaN."""
    x = double(x)
    x = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    require_finite(name, x)
    return x


class KernelPCAValues(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):
    """Kernel PCA with the kernel of self-attention, whose projections are an attention.

    ``fit`` takes keys, ``transform`` queries: numpy or torch in, the same out.

    Args:
        n_components: d, at most N; None: the keys' width p, or N where that is less.

    Attributes:
        keys_: the keys fitted on, (N, p).
        values_: theorem 1's value matrix, (N, d).
        coefficients_: dual coefficients a_dj, (N, d).
        eigenvalues_: lambda_d, (d,), falling.
        n_features_in_: p.

    Raises:
        InputError: (a ValueError) for parameters or data that are not accepted.
    """

    def __init__(self, n_components: int | None = None) -> None:
        self.n_components = n_components

    def fit(self, X: Any, y: Any = None) -> Self:
        """Find the components of the keys X, (N, p). ``y`` is ignored."""
        keys = read_matrix(self, X, reset=True, min_samples=2)
        found = kernel_pca_values(keys, self.n_components)
        self.keys_ = give_back(keys, X)
        self.values_ = give_back(found.values, X)
        self.coefficients_ = give_back(found.coefficients, X)
        self.eigenvalues_ = give_back(found.eigenvalues, X)
        return self

    def transform(self, X: Any) -> Any:
        """The projections of the queries X, (M, p), by softmax attention with ``values_``: (M, d)."""
        check_is_fitted(self)
        queries = read_matrix(self, X, reset=False)
        keys, values = (fitted(each, queries)[None, None] for each in (self.keys_, self.values_))
        projected = scaled_dot_product_attention(queries[None, None], keys, values)[0, 0]
        require_range("X", "its products with the keys", projected)
        return give_back(projected, X)

    @property
    def _n_features_out(self) -> int:
        return self.values_.shape[1]
