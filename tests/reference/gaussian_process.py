"""Gaussian-process attention as the papers write it: float64 loops over sequence, head, output and token.

They start from scores, or from queries and values; the oracle of the scores is ``reference.primal``. Sources:
Chen et al., ICML 2024 (kernel_gp); Chen and Li, ICLR 2023 (sgpa).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def gaussian_divergence(mean: Tensor, cov: Tensor, prior: Tensor) -> Tensor:
    """KL(N(mean, cov) || N(0, prior)) of one Gaussian, by inverses and determinants."""
    inverse = torch.linalg.inv(prior)
    volume = torch.logdet(prior) - torch.logdet(cov)
    return 0.5 * (torch.trace(inverse @ cov) + mean @ inverse @ mean - len(mean) + volume)


def kernel_gp(
    e: Tensor, r: Tensor, log_sqrt_lambda: Tensor, m_u: Tensor, cholesky: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Mean and variance (B, h, N, c) and the divergence, from scores (B, h, N, s)."""
    batch, heads, length, _ = e.shape
    outputs = m_u.shape[-1]
    mean = torch.zeros(batch, heads, length, outputs, dtype=e.dtype)
    variance = torch.zeros_like(mean)
    divergence = torch.zeros((), dtype=e.dtype)
    for h in range(heads):
        lam = torch.diag(torch.exp(log_sqrt_lambda[h]) ** 2)
        for c in range(outputs):
            cov = cholesky[h, c] @ cholesky[h, c].T
            prior = torch.linalg.inv(lam @ lam)
            divergence = divergence + gaussian_divergence(m_u[h, :, c], cov, prior)
            for b in range(batch):
                for i in range(length):
                    row = lam @ e[b, h, i] + lam @ r[b, h, i]
                    mean[b, h, i, c] = row @ m_u[h, :, c]
                    variance[b, h, i, c] = row @ cov @ row
    return mean, variance, divergence


def kernel(x: Tensor, y: Tensor, scale: float, lengths: Tensor) -> Tensor:
    """k(x_i, y_j) = a exp(-||(x_i - y_j) / l||^2 / 2), pair by pair."""
    rows = [[scale * math.exp(-0.5 * float((((a - b) / lengths) ** 2).sum())) for b in y] for a in x]
    return torch.tensor(rows, dtype=x.dtype)


def sgpa(
    q: Tensor, v: Tensor, z: Tensor, v_z: Tensor, cholesky: Tensor, scale: Tensor, lengths: Tensor,
    jitter: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Mean and variance (B, h, N, p), and the divergence (B,), with whole matrices and their inverses."""
    mean, variance = torch.zeros_like(q), torch.zeros_like(q)
    divergence = torch.zeros(q.shape[0], dtype=q.dtype)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            a, ell = float(scale[h]), lengths[h]
            k_zz = kernel(z[h], z[h], a, ell) + jitter * a * torch.eye(z.shape[1], dtype=q.dtype)
            k_qz, k_qq = kernel(q[b, h], z[h], a, ell), kernel(q[b, h], q[b, h], a, ell)
            inverse, factor = torch.linalg.inv(k_zz), torch.linalg.cholesky(k_zz)
            rest = k_qq - k_qz @ inverse @ k_qz.T
            for c in range(q.shape[3]):
                white = cholesky[h, c] @ cholesky[h, c].T
                cov = factor @ white @ factor.T
                mean[b, h, :, c] = rest @ v[b, h, :, c] + k_qz @ v_z[h, :, c]
                variance[b, h, :, c] = (rest + k_qz @ inverse @ cov @ inverse @ k_qz.T).diagonal()
                divergence[b] += gaussian_divergence(k_zz @ v_z[h, :, c], cov, k_zz)
                divergence[b] += 0.5 * v[b, h, :, c] @ rest @ v[b, h, :, c]
    return mean, variance, divergence
