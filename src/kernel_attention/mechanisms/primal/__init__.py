"""Primal-Attention: asymmetric kernel SVD, solved in the primal."""

from kernel_attention.mechanisms.primal.layer import PrimalAttention

__all__ = ["PrimalAttention"]
