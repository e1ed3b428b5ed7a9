"""How near the values of a layer come to the eigenvectors that kernel PCA predicts: gamma.

Source: Teo, Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component
Analysis", NeurIPS 2024 (section 2.2.2, fig. 2 and 5). The legend is that of
``kernel_attention.solvers.kernel_pca_values``. J_proj is in ``kernel_attention.solvers.projection_loss``.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.solvers.finite import times_exp
from kernel_attention.solvers.kernel_pca_values import (
    CentredGram,
    centred_gram,
    counted,
    require_matrix,
    require_values,
)
from kernel_attention.tensors.statistics import accumulation_dtype


class EigenvalueRatios(NamedTuple):
    """How near recovered coefficients a^ come to eigenvectors of K~ / N, column by column.

    ``gamma`` (..., N, d) is (K~ a^)_j / (N a^_j), constant along N exactly where a^ is an eigenvector; NaN at
    padded keys and where a^_j is 0. ``spread`` (..., d) is the mean of |gamma_i - gamma_j| over the pairs
    i != j and ``deviation`` (..., d) its standard deviation over them, the paper's measures. A few entries of
    a^ near 0 rule both, whatever the others say; they do not rule ``eigenvalues`` (..., d), the Rayleigh
    quotient a^.K~ a^ / (N a^.a^), which is what gamma should be, and ``cosine`` (..., d) of the angle between
    K~ a^ and a^, 1 exactly at an eigenvector. ``relative_spread`` is spread over eigenvalue.
    """

    gamma: Tensor
    spread: Tensor
    deviation: Tensor
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
    spread, deviation = _absolute_differences(gamma)
    size = gram.log_scale.exp()[..., None]
    parts = (
        gamma * size[..., None], spread * size, deviation * size, rayleigh * size, cosine, spread / rayleigh,
    )  # fmt: skip
    return EigenvalueRatios(*(part.to(accumulation_dtype(keys.dtype)) for part in parts))


def _recovered(gram: CentredGram, values: Tensor) -> tuple[Tensor, Tensor]:
    """A^ over exp(log_scale), and log_scale, the largest log g."""
    require_values(values, gram.centred)
    values = counted("values", values, gram.real)
    largest = gram.log_normalizer.masked_fill(~gram.real, -math.inf).amax(-1).nan_to_num(neginf=0.0)
    weights = (gram.log_normalizer - largest[..., None]).exp() * gram.real
    coefficients = weights[..., None] * values
    mean = coefficients.sum(-2, keepdim=True) / gram.num_keys[..., None, None]
    return (coefficients - mean) * gram.real[..., None], largest


def _absolute_differences(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and deviation of |x_i - x_j| over the pairs of defined entries, (..., N, d) -> (..., d) each."""
    defined = ~x.isnan()
    count = defined.sum(-2, keepdim=True)
    ordered = x.masked_fill(~defined, math.inf).sort(dim=-2).values
    rank = torch.arange(x.size(-2), device=x.device)[:, None]
    # In the sum over all pairs the entry of rank r is the larger of r pairs, the smaller of count - 1 - r.
    terms = torch.where(rank < count, (2 * rank - count + 1) * ordered, 0.0)
    pairs = (count * (count - 1) / 2).squeeze(-2)
    mean = torch.where(pairs > 0, terms.sum(-2) / pairs, math.nan)
    # The squared differences of all pairs sum to N times the squared distances from the mean.
    centre = torch.where(defined, x, 0.0).sum(-2, keepdim=True) / count
    squares = torch.where(defined, x - centre, 0.0).square().sum(-2)
    square_mean = torch.where(pairs > 0, count.squeeze(-2) * squares / pairs, math.nan)
    return mean, (square_mean - mean.square()).clamp_min(0.0).sqrt()


def _norm(columns: Tensor) -> Tensor:
    """Of each column, (..., 1, d); 1 where it is zero. Its squares need not be in range."""
    largest = columns.abs().amax(dim=-2, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    norm = largest * torch.linalg.vector_norm(columns / largest, dim=-2, keepdim=True)
    return torch.where(norm > 0, norm, 1.0)
