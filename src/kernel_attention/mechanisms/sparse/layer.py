"""Sparse attention as a layer."""

import torch
from torch import Tensor

from kernel_attention.core.engine import LayerPlan
from kernel_attention.core.parameters import Device
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import require_probability
from kernel_attention.mechanisms.sparse.functional import Implementation, PatternName, saves_logits
from kernel_attention.mechanisms.sparse.kernel import SparseKernel


@register_attention(
    "sparse",
    summary="softmax over a strided or fixed pattern",
    paper="Child et al. 2019",
    equation="softmax over a pattern of positions of stride l",
    time="N (l + N/l) p",
    memory="N (l + N/l)",
)
class SparseAttention(QueryKeyValueAttention):
    """Sparse attention with the strided or the fixed pattern of Child et al. (2019), causal or bidirectional.

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        pattern: "strided": |i - j| < stride or i - j a multiple of it; "fixed": the same block of ``stride``
            tokens, or one of the last ``summary`` tokens of any block.
        stride: l; None: sqrt(max_len) rounded, or 16 where ``max_len`` is not given.
        summary: see ``pattern``.
        impl: "auto", "blocked" or "dense", see ``kernel_attention.functional.sparse_attention``.
        max_len: longest sequence, for the default stride.
        dropout: probability of dropping an attention weight in training.
        bias: whether the four projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    kernel: SparseKernel

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
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_probability(dropout=dropout)
        self.kernel = SparseKernel(
            self.head_dim, max_len, pattern=pattern, stride=stride, summary=summary, impl=impl
        )
        self.dropout = dropout
        self.add_projections(bias, device=device, dtype=dtype)

    def plan(self, x: Tensor, *, is_causal: bool = False, compiled: bool | None = None) -> LayerPlan:
        """The plan of a call: "blocked", or "dense", the formula with its mask."""
        answers = (("blocked", "yes"), ("dense", "yes"))
        if self.kernel.impl != "auto":
            return LayerPlan(self.kernel.impl, f"impl={self.kernel.impl!r}", answers)
        if saves_logits(self.kernel.pattern, x.size(1), 1):
            return LayerPlan("blocked", "it saves logits at this length and stride", answers)
        return LayerPlan("dense", "blocks would save too few logits at this length and stride", answers)
