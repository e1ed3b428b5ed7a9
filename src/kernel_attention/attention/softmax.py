"""Canonical softmax attention, its symmetric form and the cosine kernel without softmax, as one layer."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor, nn

from kernel_attention import functional
from kernel_attention.attention.base import AttentionLayer, require_probability
from kernel_attention.attention.decoding import SoftmaxDecoder
from kernel_attention.errors import InputError, unknown

_KERNELS = ("softmax", "cosine")


class SoftmaxAttention(AttentionLayer):
    """Multi-head attention: canonical, symmetric (Q = K) or with the cosine kernel.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        kernel: "softmax" (Vaswani et al. 2017) or "cosine", phi(q) phi(k)^T without softmax (the extra
            baseline of the released Primal-Attention code).
        symmetric: queries serve as keys too (the SymViT and Symlm baseline of the kernel-PCA paper).
        dropout: probability of dropping an attention weight in training; softmax kernel only.
        bias: whether the four projections have biases.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        kernel: Literal["softmax", "cosine"] = "softmax",
        symmetric: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        if kernel not in _KERNELS:
            raise unknown("kernel", kernel, _KERNELS)
        require_probability(dropout=dropout)
        if dropout and kernel == "cosine":
            raise InputError(
                f"dropout={dropout} must be 0 with kernel='cosine', which has no attention weights"
            )
        self.kernel = kernel
        self.symmetric = symmetric
        self.dropout = dropout
        self.q_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.k_proj = None if symmetric else nn.Linear(embed_dim, embed_dim, bias=bias)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    @property
    def supports_context(self) -> bool:  # type: ignore[override]
        """Cross-attention needs a query of its own."""
        return not self.symmetric

    def attend(
        self, x: Tensor, context: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        """See :class:`AttentionLayer`."""
        source = x if context is None else context
        q = self.split_heads(self.q_proj(x))
        k = q if self.k_proj is None else self.split_heads(self.k_proj(source))
        v = self.split_heads(self.v_proj(source))
        if self.kernel == "cosine":
            out = functional.cosine_attention(q, k, v, key_padding_mask=key_padding_mask, is_causal=is_causal)
        else:
            dropout_p = self.dropout if self.training else 0.0
            out = functional.softmax_attention(
                q, k, v, key_padding_mask=key_padding_mask, is_causal=is_causal, dropout_p=dropout_p
            )
        return self.out_proj(self.merge_heads(out))

    def decoder(self) -> SoftmaxDecoder:
        """See :class:`AttentionLayer`."""
        return SoftmaxDecoder(self)

    def kernel_matrix(self, x: Tensor, *, key_padding_mask: Tensor | None = None) -> Tensor:
        """The attention matrix, or phi(q) phi(k)^T with the cosine kernel, (B, h, N, N); for analysis,
        O(N^2).
        """
        q = self.split_heads(self.q_proj(x))
        k = q if self.k_proj is None else self.split_heads(self.k_proj(x))
        if self.kernel == "cosine":
            return functional.primal_kernel(q, k, key_padding_mask=key_padding_mask)
        logits = q @ k.mT / math.sqrt(self.head_dim)
        if key_padding_mask is None:
            return logits.softmax(dim=-1)
        logits = logits.masked_fill(~key_padding_mask[:, None, None, :], -torch.inf)
        return logits.softmax(dim=-1) * key_padding_mask[:, None, :, None]

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.embed_dim}, {self.num_heads}, kernel={self.kernel!r}, symmetric={self.symmetric}"
