"""Causal attention to pooled keys: the completed blocks of a sequence, and the open one.

Token i lies in block b = i // factor. It sees the blocks 0..b - 1, which are complete, and its own block
pooled over the tokens up to i. The non-causal form on the prefix 0..i gives its last token the same output.
One tensor of N rows holds all blocks: row i is the open block at token i, and the last row of a block is the
completed block.

For the tokens of one offset i % factor, "the blocks before mine" is strict causality among blocks. Each
offset becomes a head of its own, and one causal kernel serves them all, without a mask and with
N^2 / factor products.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.padding import in_blocks
from kernel_attention.tensors.softmax.attention import fused_attention
from kernel_attention.tensors.statistics import accumulation_dtype


def completed(x: Tensor, factor: int, length: int) -> Tensor:
    """All blocks but the last one, complete: (B, h, N, p) -> (B, h, ceil(N / factor) - 1, p)."""
    return x[:, :, factor - 1 : length - 1 : factor]


def by_offset(x: Tensor, factor: int) -> Tensor:
    """Gather the tokens of each offset: (B, h, N, p) -> (B, h factor, M, p) with M = ceil(N / factor)."""
    return in_blocks(x, factor).transpose(2, 3).flatten(1, 2)


def from_offset(x: Tensor, factor: int, length: int) -> Tensor:
    """The inverse of ``by_offset``: (B, h factor, M, p) -> (B, h, N, p)."""
    return x.unflatten(1, (-1, factor)).transpose(2, 3).flatten(2, 3)[:, :, :length]


def for_each_offset(x: Tensor, factor: int) -> Tensor:
    """Repeat the keys for every offset of a head: (B, h, M, p) -> (B, h factor, M, p)."""
    return x[:, :, None].expand(-1, -1, factor, -1, -1).flatten(1, 2)


def block_causal_attention(
    q: Tensor, k: Tensor, v: Tensor, *, factor: int, dropout_p: float = 0.0, allowed: Tensor | None = None
) -> Tensor:
    """Softmax attention of token i to the completed blocks before its own and to its own, in one fused call.

    The open block differs from token to token, so it cannot be a key. Instead, one more component of queries
    and keys subtracts its logit s_i from the other logits. A key common to all tokens, with logit zero, then
    stands for the open block. One more component of the values returns the weight of that key.

    Args:
        q: queries, (B, h, N, p).
        k: row i is the open block's key at token i, (B, h, N, p).
        v: row i is the open block's value at token i, (B, h, N, p_v).
        factor: tokens per block.
        dropout_p: probability of dropping an attention weight.
        allowed: (N, ceil(N / factor)) bool, a further restriction on the completed blocks. The open block is
            always seen.

    Returns:
        (B, h, N, p_v).
    """
    length, width = q.size(2), v.size(3)
    scale = q.size(3) ** -0.5
    dtype = accumulation_dtype(q.dtype)
    own = (q.to(dtype) * k.to(dtype)).sum(dim=-1, keepdim=True)
    high = own.to(q.dtype)
    # In 16 bits one component is not exact enough for the logit, so two hold it.
    parts = [high] if dtype == q.dtype else [high, (own - high).to(q.dtype)]
    q = torch.cat([q, *parts], dim=-1)
    keys, values = completed(k, factor, length), completed(v, factor, length)
    keys = torch.nn.functional.pad(keys, (0, len(parts)), value=-1.0)
    keys = torch.nn.functional.pad(keys, (0, 0, 1, 0))
    # the common key's value: (0, ..., 0, 1)
    size, key = width + len(parts), ("mark", width, len(parts), v.dtype)
    mark = kept_constant(key, v, lambda: (torch.arange(size, device=v.device) == width).to(v.dtype))
    mark = mark.expand(*values.shape[:2], 1, -1)
    values = torch.cat([mark, torch.nn.functional.pad(values, (0, len(parts)))], dim=2)
    if allowed is None:
        out = fused_attention(
            by_offset(q, factor), for_each_offset(keys, factor), for_each_offset(values, factor),
            is_causal=True, dropout_p=dropout_p, scale=scale,
        )  # fmt: skip
        out = from_offset(out, factor, length)
    else:
        block = torch.arange(keys.size(2) - 1, device=q.device)
        earlier = block < (torch.arange(length, device=q.device) // factor)[:, None]
        seen = torch.nn.functional.pad(earlier & allowed[:, : block.size(0)], (1, 0), value=True)
        out = fused_attention(q, keys, values, mask=seen, dropout_p=dropout_p, scale=scale)
    seen, weight, *_ = out.split([width, 1, *[1] * (len(parts) - 1)], dim=-1)
    return seen + weight * v


def softmax_over_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    factor: int = 1,
    attention_mask: Tensor | None = None,
    is_causal: bool = False,
    dropout_p: float = 0.0,
) -> Tensor:
    """Softmax attention to pooled keys: q (B, h, N, p), k and v (B, h, S, p).

    With ``is_causal``, row i of k and v is the open block at token i. ``attention_mask`` (B, S) is not read
    then: it must be right padding, which no real token sees.
    """
    if is_causal and factor > 1:
        return block_causal_attention(q, k, v, factor=factor, dropout_p=dropout_p)
    mask = None if is_causal or attention_mask is None else attention_mask[:, None, None, :]
    return fused_attention(q, k, v, mask=mask, is_causal=is_causal, dropout_p=dropout_p)
