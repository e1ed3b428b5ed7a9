"""Sparse attention as a layer."""

from __future__ import annotations

from kernel_attention.attention.support_vector import SupportVectorAttention
from kernel_attention.functional.sparse import Implementation, PatternName


class SparseAttention(SupportVectorAttention):
    """Sparse attention with the strided or the fixed pattern of Child et al. (2019), causal or bidirectional.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        pattern: "strided": |i - j| < stride or i - j a multiple of it; "fixed": the same block of ``stride``
            tokens, or one of the last ``summary`` tokens of any block.
        stride: l; None: sqrt(max_len) rounded, or 16 where ``max_len`` is not given.
        summary: see ``pattern``.
        impl: "auto", "blocked" or "dense", see :func:`kernel_attention.functional.sparse_attention`.
        max_len: longest sequence, for the default stride.
        dropout: probability of dropping an attention weight in training.
        bias: whether the four projections have biases.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        pattern: PatternName = "strided",
        stride: int | None = None,
        summary: int = 1,
        impl: Implementation = "auto",
        max_len: int | None = None,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        kernel = {"sparse": {"pattern": pattern, "stride": stride, "summary": summary, "impl": impl}}
        super().__init__(
            embed_dim,
            num_heads,
            kernel=kernel,
            beta=0.0,
            factors=1,
            max_len=max_len,
            dropout=dropout,
            bias=bias,
        )

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.embed_dim}, {self.num_heads}"
