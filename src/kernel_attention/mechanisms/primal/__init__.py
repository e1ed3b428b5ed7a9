"""Primal-Attention: asymmetric kernel SVD of self-attention, solved in the primal."""

from kernel_attention.mechanisms.primal.layer import PrimalAttention

__all__ = ["PrimalAttention"]
