"""Posteriors of Gaussian-process attention, and their divergences from the priors.

Sources: Chen, Tao, Tonin, Suykens, "Self-Attention through Kernel-Eigen Pair Sparse Variational Gaussian
Processes", ICML 2024 (kernel_gp); Chen, Li, "Calibrating Transformers via Sparse Gaussian Processes", ICLR
2023 (sgpa).

Legend: B batch, h heads, N tokens, p head width, s projection directions (rank), c outputs of the process,
M inducing keys.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.primal.functional import PrimalScores
from kernel_attention.tensors.statistics import exactly, without_autocast


class Distribution(NamedTuple):
    """Mean and variance of every output, of one shape."""

    mean: Tensor
    variance: Tensor


class SparsePosterior(NamedTuple):
    """Mean and variance (B, h, N, p) of every output, and the divergence of every sequence (B,)."""

    mean: Tensor
    variance: Tensor
    divergence: Tensor


def kernel_gp_attention(scores: PrimalScores, log_sqrt_lambda: Tensor, values: Tensor) -> Tensor:
    """f_i = (e_i + r_i)^T Lambda u, the process at the inducing variables u: (B, h, N, c).

    With u = m_u this is the mean of the posterior, with u drawn from N(m_u, S_u) a sample of it, jointly over
    the tokens. At the kernel SVD e_i^T Lambda is row i of the left singular vectors, Lambda = Sigma^{-1}.

    Args:
        scores: e and r of Primal-Attention, (B, h, N, s) each.
        log_sqrt_lambda: log of the square root of Lambda's diagonal, (h, s).
        values: u, (h, s, c), or (B, h, s, c) with one draw a sequence.
    """
    e, r = scores
    with without_autocast(e):
        values = exactly(values) * exactly(log_sqrt_lambda).mul(2).exp()[..., None]
    return (e + r) @ values.to(e.dtype)


def kernel_gp_posterior(
    scores: PrimalScores, log_sqrt_lambda: Tensor, mean: Tensor, cholesky: Tensor
) -> Distribution:
    """Mean and variance of f, (B, h, N, c) each: h_i^T m_u and h_i^T S_u h_i, h_i = Lambda (e_i + r_i).

    Args:
        scores: e and r, (B, h, N, s) each.
        log_sqrt_lambda: (h, s).
        mean: m_u, (h, s, c).
        cholesky: L with S_u = L L^T for every output, (h, c, s, s), lower triangular.
    """
    e, r = scores
    with without_autocast(e):
        rows = exactly(e + r) * exactly(log_sqrt_lambda).mul(2).exp()[:, None]
        factors = exactly(cholesky).movedim(1, 2).flatten(2)  # (h, s, c s)
        spread = (rows @ factors).unflatten(-1, (cholesky.size(1), -1)).square().sum(-1)
        return Distribution(rows @ exactly(mean), spread)


def kernel_gp_divergence(log_sqrt_lambda: Tensor, mean: Tensor, cholesky: Tensor) -> Tensor:
    """KL(N(m_u, S_u) || N(0, Lambda^{-2})), a sum over heads and outputs; 0-dimensional.

    The diagonal of ``cholesky`` is positive. Arguments as in ``kernel_gp_posterior``.
    """
    with without_autocast(mean):
        log_lambda = exactly(log_sqrt_lambda).mul(2)  # the prior's standard deviation is its inverse
        scale = log_lambda.exp()
        cholesky = exactly(cholesky)
        spread = (cholesky * scale[:, None, :, None]).square().sum()
        distance = (exactly(mean) * scale[..., None]).square().sum()
        num_outputs = mean.size(-1)
        log_volume = cholesky.diagonal(dim1=-2, dim2=-1).log().sum() + num_outputs * log_lambda.sum()
        return 0.5 * (spread + distance - num_outputs * log_lambda.numel()) - log_volume


def sgpa_posterior(
    q: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    cholesky: Tensor,
    log_scale: Tensor,
    log_lengths: Tensor,
    *,
    jitter: float = 1e-5,
    attention_mask: Tensor | None = None,
) -> SparsePosterior:
    """The posterior of sparse Gaussian-process attention with decoupled inducing points; O(N^2) time.

    With k(x, y) = a exp(-|| (x - y) / l ||^2 / 2), and Z the inducing keys,

        mean      K_qq v - K_qZ K_ZZ^{-1} K_Zq v + K_qZ values
        variance  k(q, q) - K_qZ K_ZZ^{-1} K_Zq + ||L^T C^{-1} K_Zq||^2,  C C^T = K_ZZ.

    Args:
        q: queries, which are the keys too, (B, h, N, p).
        v: values, (B, h, N, p).
        keys: Z, (h, M, p).
        values: their values, (h, M, p).
        cholesky: L of the whitened covariance, for every output, (h, p, M, M), lower triangular.
        log_scale: log a, (h,).
        log_lengths: log l, (h, p).
        jitter: what is added to the diagonal of K_ZZ, in units of a.
        attention_mask: (B, N), True = real token.
    """
    with without_autocast(q):
        q, v, keys, values, cholesky = (exactly(part) for part in (q, v, keys, values, cholesky))
        lengths, scale = exactly(log_lengths).exp()[:, None], exactly(log_scale).exp()[:, None, None]
        if attention_mask is not None:
            ignored = ~attention_mask[:, None, :, None]
            q, v = q.masked_fill(ignored, 0.0), v.masked_fill(ignored, 0.0)
        q, keys = q / lengths, keys / lengths
        k_qz = scale * unit_kernel(q, keys)
        k_zz = scale * (-0.5 * (keys[:, :, None] - keys[:, None]).square().sum(-1)).exp()
        k_zz = k_zz + jitter * scale * torch.eye(keys.size(1), dtype=q.dtype, device=q.device)
        factor = torch.linalg.cholesky_ex(k_zz).L
        k_zq = k_qz.mT
        white = torch.linalg.solve_triangular(factor.expand(q.size(0), -1, -1, -1), k_zq, upper=False)
        own = scale * (unit_kernel(q, q) @ v)  # K_qq v
        if attention_mask is not None:
            white = white.masked_fill(~attention_mask[:, None, None, :], 0.0)
        seen = white @ v  # C^{-1} K_Zq v
        mean = own - white.mT @ seen + k_qz @ values
        spread = (white.mT[:, :, None] @ cholesky).square().sum(-1).movedim(2, -1)  # (B, h, N, p)
        variance = (scale - white.square().sum(2)[..., None] + spread).clamp_min(0.0)
        shared = cholesky.square().sum() - cholesky.size(2) * values.size(-1) * values.size(0)
        shared = 0.5 * shared - cholesky.diagonal(dim1=-2, dim2=-1).log().sum()
        shared = shared + 0.5 * (values * (k_zz @ values)).sum()
        divergence = shared + 0.5 * ((v * own).sum(dim=(1, 2, 3)) - seen.square().sum(dim=(1, 2, 3)))
        return SparsePosterior(mean, variance, divergence)


def unit_kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-||x_i - y_j||^2 / 2)."""
    squares = x.square().sum(-1)[..., None] + y.square().sum(-1)[..., None, :]
    logits = (x @ y.mT - 0.5 * squares).clamp_max(0.0)
    if x is y:  # of large tokens the rounding alone would be far from 0
        logits = logits.masked_fill(torch.eye(x.size(-2), dtype=torch.bool, device=x.device), 0.0)
    return logits.exp()


def sample_normal(mean: Tensor, cholesky: Tensor, batch: int) -> Tensor:
    """A draw of N(mean, L L^T) for every sequence: mean (h, s, c), L (h, c, s, s) -> (B, h, s, c)."""
    noise = torch.randn(batch, *cholesky.shape[:-1], 1, dtype=cholesky.dtype, device=cholesky.device)
    return mean + (cholesky @ noise).squeeze(-1).mT


def positive_cholesky(factor: Tensor) -> Tensor:
    """A lower triangular matrix with the exponentials of the diagonal on it, (.., s, s)."""
    return factor.tril(-1) + factor.diagonal(dim1=-2, dim2=-1).exp().diag_embed()
