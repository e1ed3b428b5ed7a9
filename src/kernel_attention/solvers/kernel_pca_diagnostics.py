"""How near the values of a layer come to those that kernel PCA predicts.

Source: Teo, Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component
Analysis", NeurIPS 2024 (eq. 13, section 2.2.2, appendix C). The legend is that of
``kernel_attention.solvers.kernel_pca_values``; M queries.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import require_finite, require_range, times_exp
from kernel_attention.solvers.kernel_pca_values import CentredGram, centred_gram, double, require_matrix
from kernel_attention.tensors.statistics import accumulation_dtype


class EigenvalueRatios(NamedTuple):
    """How near recovered coefficients a^ come to eigenvectors of K~ / N, column by column.

    ``gamma`` (..., N, d) is (K~ a^)_j / (N a^_j), constant along N exactly where a^ is an eigenvector; NaN at
    padded keys and where a^_j is 0. ``spread`` (..., d) is the mean of |gamma_i - gamma_j| over the pairs
    i != j, the paper's measure. A few entries of a^ near 0 rule it, whatever the others say; they do not rule
    ``eigenvalues`` (..., d), the Rayleigh quotient a^.K~ a^ / (N a^.a^), which is what gamma should be, and
    ``cosine`` (..., d) of the angle between K~ a^ and a^, 1 exactly at an eigenvector. ``relative_spread`` is
    spread over eigenvalue.
    """

    gamma: Tensor
    spread: Tensor
    eigenvalues: Tensor
    cosine: Tensor
    relative_spread: Tensor


def recovered_coefficients(keys: Tensor, values: Tensor, *, attention_mask: Tensor | None = None) -> Tensor:
    """The dual coefficients that a layer's values stand for, A^ = (I - 1_N)^+ G^-1 V (section 2.2.2).

    G = diag(1 / g(k_j)); 1_N is the N x N matrix of 1/N. The paper writes an inverse, but I - 1_N is the
    projector that takes the mean away and has none: its pseudo-inverse is itself. It gives back exactly the
    coefficients of columns sum 0, as those of theorem 1 are. g overflows float32 at logits of 88: the angles
    of ``eigenvalue_ratios`` do not need its size.

    Args:
        keys: (..., N, p).
        values: (..., N, d).
        attention_mask: broadcast to (..., N), True = real key.

    Returns:
        (..., N, d), 0 at padded keys.
    """
    gram = centred_gram(keys, attention_mask)
    coefficients, log_scale = _recovered(gram, values)
    return times_exp(coefficients, log_scale[..., None, None]).to(accumulation_dtype(keys.dtype))


def eigenvalue_ratios(
    keys: Tensor, values: Tensor, *, attention_mask: Tensor | None = None
) -> EigenvalueRatios:
    """gamma of every column of the values and its spread (section 2.2.2, fig. 2 and 5).

    Scaling a column of the values changes nothing.

    Args:
        keys: (..., N, p).
        values: (..., N, d), a layer's own or those of ``kernel_pca_values``.
        attention_mask: broadcast to (..., N), True = real key.

    Raises:
        InputError: for a single key, whose centred kernel is 0 without eigenvectors, and for keys or values
            of other shapes or not finite.
    """
    require_matrix("keys", keys)
    if keys.size(-2) < 2:
        raise InputError(f"keys has shape {tuple(keys.shape)}, expected (..., N, p) with N at least 2")
    gram = centred_gram(keys, attention_mask)
    coefficients, _ = _recovered(gram, values)
    coefficients = coefficients / _norm(coefficients)
    image = gram.centred @ coefficients / gram.num_keys[..., None, None]
    rayleigh = (coefficients * image).sum(-2)
    cosine = rayleigh / _norm(image)[..., 0, :]
    defined = gram.real[..., None] & (coefficients != 0)
    gamma = torch.where(defined, image / torch.where(defined, coefficients, 1.0), math.nan)
    spread = _mean_absolute_difference(gamma)
    size = gram.log_scale.exp()
    parts = (
        gamma * size[..., None, None], spread * size[..., None], rayleigh * size[..., None], cosine,
        spread / rayleigh,
    )  # fmt: skip
    return EigenvalueRatios(*(part.to(accumulation_dtype(keys.dtype)) for part in parts))


def projection_error(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """J_proj of a layer (eq. 13): the mean over the queries of ||phi(q_i)||^2 - ||h_i||^2, shape (...).

    h_i is the output of softmax attention and ||phi(q_i)||^2 = exp(q_i.q_i/sqrt(p) - 2 log g(q_i)), one
    exponential of a difference. With the values of theorem 1 it is the mean squared distance between phi(q_i)
    and its projection on the d axes; with other values it is not a squared distance and may be negative, for
    example for large values. It is infinite where a query is so much longer than all keys that phi(q_i)
    overflows float64.

    Args:
        queries: (..., M, p).
        keys: (..., N, p).
        values: (..., N, d).
        attention_mask: broadcast to (..., N), True = real key.
        query_mask: broadcast to (..., M), True = a query that counts; None: ``attention_mask``
            where M = N, as in self-attention, and every query otherwise.
        is_causal: query i sees keys 0..i: each has the feature map of its own prefix. Needs M = N.

    Raises:
        InputError: where the shapes do not fit, or what counts is not finite.
    """
    require_matrix("keys", keys)
    if queries.dim() < 2 or queries.size(-1) != keys.size(-1):
        raise InputError(
            f"queries has shape {tuple(queries.shape)}, expected (..., M, {keys.size(-1)}), the keys' width"
        )
    _require_values(values, keys)
    if is_causal and queries.size(-2) != keys.size(-2):
        raise InputError(
            f"is_causal=True needs as many queries as keys, got {queries.size(-2)} and {keys.size(-2)}"
        )
    counted = query_mask
    if counted is None and queries.size(-2) == keys.size(-2):
        counted = attention_mask
    queries = _counted("queries", queries, counted)
    exact, values = (_counted(*each, attention_mask) for each in (("keys", keys), ("values", values)))
    scale = keys.size(-1) ** -0.5
    logits = scale * queries @ exact.mT
    require_range("queries", "their products with the keys", logits)
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask[..., None, :], -math.inf)
    if is_causal:
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(ahead, -math.inf)
    log_normalizer = logits.logsumexp(-1)
    lengths = (scale * queries.square().sum(-1) - 2 * log_normalizer).exp()
    # A query that sees no key has an infinite phi(q) and the output 0.
    weights = (
        logits - log_normalizer[..., None].masked_fill(log_normalizer[..., None] == -math.inf, 0.0)
    ).exp()
    projected = (weights @ values).square().sum(-1)
    require_range("values", "the squares of the outputs", projected)
    errors = lengths - projected
    if counted is None:
        mean = errors.mean(-1)
    else:
        counted = counted.expand(errors.shape)
        mean = errors.masked_fill(~counted, 0.0).sum(-1) / counted.sum(-1)
    return mean.to(accumulation_dtype(keys.dtype))


def _counted(name: str, x: Tensor, mask: Tensor | None) -> Tensor:
    """x in double precision, 0 where it does not count, because padding may hold any value, also NaN."""
    x = double(x)
    x = x if mask is None else x.masked_fill(~mask[..., None], 0.0)
    require_finite(name, x)
    return x


def _recovered(gram: CentredGram, values: Tensor) -> tuple[Tensor, Tensor]:
    """A^ over exp(log_scale), and log_scale, the largest log g."""
    _require_values(values, gram.centred)
    values = _counted("values", values, gram.real)
    largest = gram.log_normalizer.masked_fill(~gram.real, -math.inf).amax(-1).nan_to_num(neginf=0.0)
    weights = (gram.log_normalizer - largest[..., None]).exp() * gram.real
    coefficients = weights[..., None] * values
    mean = coefficients.sum(-2, keepdim=True) / gram.num_keys[..., None, None]
    return (coefficients - mean) * gram.real[..., None], largest


def _mean_absolute_difference(x: Tensor) -> Tensor:
    """Mean of |x_i - x_j| over the pairs of defined entries along dimension -2: (..., N, d) -> (..., d)."""
    defined = ~x.isnan()
    count = defined.sum(-2, keepdim=True)
    ordered = x.masked_fill(~defined, math.inf).sort(dim=-2).values
    rank = torch.arange(x.size(-2), device=x.device)[:, None]
    # In the sum over all pairs the entry of rank r is the larger of r pairs, the smaller of count - 1 - r.
    terms = torch.where(rank < count, (2 * rank - count + 1) * ordered, 0.0)
    pairs = (count * (count - 1) / 2).squeeze(-2)
    return torch.where(pairs > 0, terms.sum(-2) / pairs, math.nan)


def _norm(columns: Tensor) -> Tensor:
    """Of each column, (..., 1, d); 1 where it is zero. Its squares need not be in range."""
    largest = columns.abs().amax(dim=-2, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    norm = largest * torch.linalg.vector_norm(columns / largest, dim=-2, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)


def _require_values(values: Tensor, keys: Tensor) -> None:
    if values.dim() < 2 or values.size(-2) != keys.size(-2):
        raise InputError(
            f"values has shape {tuple(values.shape)}, expected (..., {keys.size(-2)}, d), a row for every key"
        )
