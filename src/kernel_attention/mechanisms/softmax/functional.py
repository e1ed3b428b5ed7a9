"""The baselines: canonical softmax attention, its symmetric form, and the cosine kernel without softmax."""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.tensors.fused_softmax import fused_attention


def softmax_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    key_padding_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """softmax(q k^T / sqrt(p)) v through PyTorch's fused kernel; q = k gives the symmetric form.

    Args:
        q: queries, (B, h, N, p).
        k: keys, (B, h, S, p).
        v: values, (B, h, S, p_v).
        key_padding_mask: (B, S), True = real token.
        is_causal: query i sees keys 0..i only.
        dropout_p: probability of dropping an attention weight.
        scale: replaces 1/sqrt(p).

    Returns:
        (B, h, N, p_v). A query that sees no key gets zeros.
    """
    mask = None if key_padding_mask is None else key_padding_mask[:, None, None, :]
    if is_causal and mask is not None:
        mask = mask & torch.ones(q.size(2), k.size(2), dtype=torch.bool, device=q.device).tril()
        is_causal = False
    return fused_attention(q, k, v, mask=mask, dropout_p=dropout_p, is_causal=is_causal, scale=scale)
