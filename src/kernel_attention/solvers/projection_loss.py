"""How near a layer comes to kernel PCA: its projection loss J_proj, as printed and as released, and gamma.

Source: Teo, Nguyen, "Unveiling the Hidden Structure of Self-Attention via Kernel Principal Component
Analysis", NeurIPS 2024 (eq. 13, fig. 1, appendix C; of gamma, section 2.2.2, fig. 2 and 5). The legend is
that of ``kernel_attention.solvers.kernel_pca_values``; M queries.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError, unknown
from kernel_attention.solvers.arrays import require_range, times_exp
from kernel_attention.solvers.kernel_pca_values import (
    CentredGram,
    centred_gram,
    counted,
    require_matrix,
    require_values,
)
from kernel_attention.tensors.statistics import accumulation_dtype

FORMS = ("raw", "released")


class ProjectionLoss(NamedTuple):
    """The two parts of a projection loss, whose difference it is.

    ``log_length`` (...) is the logarithm of the mean over the queries of ||phi(q_i)||^2, and ``output``
    (...) the mean of ||h_i||^2. A logarithm does not leave the range where a query is far longer than the
    keys.
    """

    log_length: Tensor
    output: Tensor

    @property
    def error(self) -> Tensor:
        """J_proj = exp(log_length) - output; infinite where the length leaves the range of the precision."""
        return self.log_length.exp() - self.output

    @property
    def log_error(self) -> Tensor:
        """log J_proj, NaN where J_proj is negative; finite also where J_proj overflows."""
        return self.log_length + torch.log1p(-self.output * (-self.log_length).exp())

    def pooled(self) -> ProjectionLoss:
        """The parts of the mean loss of all entries, 0-dimensional."""
        log_length = self.log_length.flatten().logsumexp(0) - math.log(self.log_length.numel())
        return ProjectionLoss(log_length, self.output.mean())


def projection_loss(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    form: Literal["raw", "released"] = "raw",
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
) -> ProjectionLoss:
    """The parts of J_proj = mean_i(||phi(q_i)||^2 - ||h_i||^2), in one of two forms.

    * ``raw`` is equation 13: h_i is the output of softmax attention, and
      ||phi(q_i)||^2 = exp(q_i.q_i / sqrt(p) - 2 log g(q_i)), one exponential of a difference.
    * ``released`` is what the authors' code computes and figure 1 shows the logarithm of. Every query and key
      is replaced by its standard score over its p channels, with the unbiased deviation, and attention is
      that of the scores (their model is trained so). Appendix C writes g through the first column of the
      attention matrix; the code leaves 1/sqrt(p) out of q.q and of q.k_1 there, and keeps it in the softmax:
      ||phi(q_i)||^2 = exp(q_i.q_i - 2 (1 - 1/sqrt(p)) q_i.k_1 - 2 log g(q_i)), where q_i.q_i = p - 1. It
      depends on which key is the first: the class token's in a vision transformer with one. The figure is
      ``log_error`` of the mean over batch and heads (``pooled``), averaged over the layers. Since the length
      is near e^p, the values hardly count in it.

    With the values of theorem 1, the raw form is the mean squared distance between phi(q_i) and its
    projection on the d axes. With other values it is not a squared distance, and it may be negative.

    Args:
        queries: (..., M, p).
        keys: (..., N, p).
        values: (..., N, d).
        form: raw or released; the latter needs p of at least 2, and takes a vector whose channels are all
            equal for 0.
        attention_mask: broadcast to (..., N), True = real key; the first real one is k_1.
        query_mask: broadcast to (..., M), True = a query that counts; None: ``attention_mask``
            where M = N, as in self-attention, and every query otherwise.
        is_causal: query i sees keys 0..i: each has the feature map of its own prefix. Needs M = N.

    Raises:
        InputError: where the shapes do not fit, or what counts is not finite.
    """
    found = _double_loss(queries, keys, values, form, attention_mask, query_mask, is_causal)
    return ProjectionLoss(*(part.to(accumulation_dtype(keys.dtype)) for part in found))


def projection_error(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    attention_mask: Tensor | None = None,
    query_mask: Tensor | None = None,
    is_causal: bool = False,
) -> Tensor:
    """J_proj of a layer as equation 13 has it, (...): the difference of the parts of ``projection_loss``.

    It is infinite where a query is so much longer than all keys that ||phi(q_i)||^2 overflows. The arguments
    and errors are those of ``projection_loss``.
    """
    found = _double_loss(queries, keys, values, "raw", attention_mask, query_mask, is_causal)
    return found.error.to(accumulation_dtype(keys.dtype))


def _double_loss(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    form: str,
    attention_mask: Tensor | None,
    query_mask: Tensor | None,
    is_causal: bool,
) -> ProjectionLoss:
    """``projection_loss`` in double precision."""
    _check_arguments(queries, keys, values, form, is_causal)
    if query_mask is None and queries.size(-2) == keys.size(-2):
        query_mask = attention_mask
    queries = counted("queries", queries, query_mask)
    keys, values = (counted(*each, attention_mask) for each in (("keys", keys), ("values", values)))
    scale = keys.size(-1) ** -0.5
    if form == "released":
        queries, keys = _standard_scores(queries), _standard_scores(keys)
    logits = scale * queries @ keys.mT
    require_range("queries", "their products with the keys", logits)
    log_lengths = queries.square().sum(-1)
    if form == "released":
        log_lengths = log_lengths - 2 * (1 / scale - 1) * _first_column(logits, attention_mask)
    else:
        log_lengths = scale * log_lengths
    logits = _hide(logits, attention_mask, is_causal)
    log_normalizer = logits.logsumexp(-1)
    log_lengths = log_lengths - 2 * log_normalizer
    # A query that sees no key has an infinite phi(q) and the output 0.
    shift = log_normalizer.masked_fill(log_normalizer == -math.inf, 0.0)[..., None]
    outputs = ((logits - shift).exp() @ values).square().sum(-1)
    require_range("values", "the squares of the outputs", outputs)
    real = torch.ones_like(outputs, dtype=torch.bool)
    real = real if query_mask is None else real & query_mask
    count = real.sum(-1).to(outputs.dtype)
    log_length = log_lengths.masked_fill(~real, -math.inf).logsumexp(-1) - count.log()
    return ProjectionLoss(log_length, outputs.masked_fill(~real, 0.0).sum(-1) / count)


def _check_arguments(queries: Tensor, keys: Tensor, values: Tensor, form: str, is_causal: bool) -> None:
    if form not in FORMS:
        raise unknown("form", form, FORMS)
    require_matrix("keys", keys)
    if queries.dim() < 2 or queries.size(-1) != keys.size(-1):
        raise InputError(
            f"queries has shape {tuple(queries.shape)}, expected (..., M, {keys.size(-1)}), the keys' width"
        )
    if form == "released" and keys.size(-1) < 2:
        raise InputError(
            f"keys has shape {tuple(keys.shape)}, expected (..., N, p) with p at least 2: form 'released' "
            "standardises over the channels"
        )
    require_values(values, keys)
    if is_causal and queries.size(-2) != keys.size(-2):
        raise InputError(
            f"is_causal=True needs as many queries as keys, got {queries.size(-2)} and {keys.size(-2)}"
        )


def _standard_scores(x: Tensor) -> Tensor:
    """(x - mean) / deviation of every row, (..., N, p); 0 where the deviation is rounding error."""
    centred = x - x.mean(-1, keepdim=True)
    norm = torch.linalg.vector_norm(centred, dim=-1, keepdim=True)
    rounding = torch.finfo(x.dtype).eps * x.size(-1) * x.abs().amax(-1, keepdim=True)
    is_flat = norm <= rounding
    scores = centred * math.sqrt(x.size(-1) - 1) / norm.masked_fill(is_flat, 1.0)
    return scores.masked_fill(is_flat, 0.0)


def _first_column(logits: Tensor, attention_mask: Tensor | None) -> Tensor:
    """The logits of the first real key, (..., M, N) -> (..., M)."""
    if attention_mask is None:
        return logits[..., 0]
    first = attention_mask.expand(*logits.shape[:-2], logits.size(-1)).int().argmax(-1)
    return logits.gather(-1, first[..., None, None].expand(*logits.shape[:-1], 1))[..., 0]


def _hide(logits: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
    """The logits, -infinity at keys that a query does not see."""
    if attention_mask is not None:
        logits = logits.masked_fill(~attention_mask[..., None, :], -math.inf)
    if is_causal:
        ahead = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        logits = logits.masked_fill(ahead, -math.inf)
    return logits


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
