"""A pytest plugin that adds a mechanism as CONTRIBUTING says: a function, a thin layer, a table row."""

from __future__ import annotations

from torch import Tensor, nn

from kernel_attention.core.layer import AttentionLayer
from kernel_attention.core.registry import register_attention
from kernel_attention.tensors.statistics import running_mean


def mean_attention(v: Tensor, attention_mask: Tensor | None, is_causal: bool) -> Tensor:
    """Every token gets the mean of the values, (B, h, N, p), over the real tokens it may see."""
    if is_causal:
        return running_mean(v, attention_mask)
    if attention_mask is None:
        return v.mean(dim=2, keepdim=True).expand_as(v)
    mask = attention_mask[:, None, :, None]
    total = v.masked_fill(~mask, 0.0).sum(dim=2, keepdim=True)
    return (total / mask.sum(dim=2, keepdim=True).clamp_min(1)).expand_as(v)


@register_attention("dummy", paper="none", equation="mean(v)", time="N p", memory="N p")
class MeanAttention(AttentionLayer):
    """Attention with equal weights."""

    def __init__(self, embed_dim: int, num_heads: int, *, bias: bool = True) -> None:
        super().__init__(embed_dim, num_heads)
        self.v_proj = nn.Linear(embed_dim, embed_dim, bias=bias)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias)

    def attend(
        self, x: Tensor, context: Tensor | None, attention_mask: Tensor | None, is_causal: bool
    ) -> Tensor:
        out = mean_attention(self.split_heads(self.v_proj(x)), attention_mask, is_causal)
        return self.out_proj(self.merge_heads(out))
