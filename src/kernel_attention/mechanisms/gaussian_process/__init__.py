"""Gaussian-process attention: outputs with a mean and a variance.

``kernel_gp`` stands on the scores of the family ``primal``.
"""

from kernel_attention.mechanisms.gaussian_process.functional import (
    Distribution,
    kernel_gp_attention,
    kernel_gp_divergence,
    kernel_gp_posterior,
    sgpa_posterior,
)
from kernel_attention.mechanisms.gaussian_process.layer import KernelGPAttention, SparseGPAttention

__all__ = [
    "Distribution",
    "KernelGPAttention",
    "SparseGPAttention",
    "kernel_gp_attention",
    "kernel_gp_divergence",
    "kernel_gp_posterior",
    "sgpa_posterior",
]
