"""Canonical softmax attention and its symmetric form, as one layer."""

import torch

from kernel_attention.core.parameters import Device
from kernel_attention.core.query_key_value import QueryKeyValueAttention
from kernel_attention.core.registry import register_attention
from kernel_attention.errors import require_probability
from kernel_attention.mechanisms.softmax.kernel import SoftmaxKernel


@register_attention(
    "symmetric",
    summary="softmax attention whose keys are its queries",
    paper="Teo & Nguyen 2024, kernel PCA",
    equation="softmax(q q^T / sqrt(p)) v",
    time="N^2 p",
    memory="N p",
    preset={"symmetric": True},
)
@register_attention(
    "softmax",
    summary="canonical attention, through PyTorch's fused kernel",
    paper="Vaswani et al. 2017",
    equation="softmax(q k^T / sqrt(p)) v",
    time="N^2 p",
    memory="N p",
    preset={"symmetric": False},
)
class SoftmaxAttention(QueryKeyValueAttention):
    """Multi-head softmax attention: canonical (Vaswani et al. 2017) or symmetric (Q = K).

    Args:
        embed_dim: model width d.
        num_heads: number of heads; divides d.
        symmetric: queries serve as keys too (the SymViT and Symlm baseline of the kernel-PCA paper).
        dropout: probability of dropping an attention weight in training.
        bias: whether the projections have biases.
        device: of the parameters; None: the default.
        dtype: of the parameters; None: the default.
    """

    softmax_reading = "exact"

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        symmetric: bool = False,
        dropout: float = 0.0,
        bias: bool = True,
        device: Device = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(embed_dim, num_heads)
        require_probability(dropout=dropout)
        self.kernel = SoftmaxKernel(self.head_dim)
        self.symmetric = symmetric
        self.dropout = dropout
        self.add_projections(bias, symmetric=symmetric, device=device, dtype=dtype)

    def reads_queries_alone(self) -> bool:
        """Unless the queries are the keys."""
        return not self.symmetric

    def extra_repr(self) -> str:
        """The options, for print(model)."""
        return f"{self.embed_dim}, {self.num_heads}, symmetric={self.symmetric}"
