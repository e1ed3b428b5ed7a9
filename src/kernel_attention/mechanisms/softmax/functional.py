"""The baselines: canonical softmax attention and its symmetric form."""

import torch
from torch import Tensor

from kernel_attention.tensors.padding import compaction
from kernel_attention.tensors.softmax.attention import fused_attention


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(p)) v through PyTorch's fused kernel; q = k gives the symmetric form.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        attention_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only; with ``attention_mask`` and S = N it is token i's own.
        dropout_p: probability of dropping an attention weight.
        scale: replaces 1/sqrt(p).

    Returns:
        (B, h, N, p_v). Queries that see no key get zeros; so do padded queries in the causal form.
    """
    if is_causal and attention_mask is not None and q.size(2) == k.size(2):
        return _causal_over_real_tokens(q, k, v, attention_mask, dropout_p, scale)
    mask = None if attention_mask is None else attention_mask[:, None, None, :]
    if is_causal and mask is not None:
        mask = mask & torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        is_causal = False
    return fused_attention(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)


def _causal_over_real_tokens(
    q: Tensor, k: Tensor, v: Tensor, attention_mask: Tensor, dropout_p: float, scale: float | None
) -> Tensor:
    """Causal attention without an N x N mask: right padding lies in the future of all real tokens.

    The queries of padding are set to zero, so their logits do not overflow and their gradients are zeros.
    """
    padded = ~attention_mask[:, None, :, None]
    q = q.masked_fill(padded, 0.0)
    moved = compaction(attention_mask)
    if moved is not None:
        q, k, v = moved.apply(q), moved.apply(k), moved.apply(v)
    out = softmax_attention(q, k, v, is_causal=True, dropout_p=dropout_p, scale=scale)
    return (out if moved is None else moved.undo(out)).masked_fill(padded, 0.0)
