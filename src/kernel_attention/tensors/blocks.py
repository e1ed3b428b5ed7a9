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
    """Gather the tokens of each offset: (B, h, N, p) -> (B h, factor, M, p) with M = ceil(N / factor)."""
    return in_blocks(x, factor).transpose(2, 3).flatten(0, 1)


def from_offset(x: Tensor, heads: int, length: int) -> Tensor:
    """The inverse of ``by_offset``: (B h, factor, M, p) -> (B, h, N, p)."""
    return x.unflatten(0, (-1, heads)).transpose(2, 3).flatten(2, 3)[:, :, :length]


def for_each_offset(x: Tensor, factor: int) -> Tensor:
    """The keys of every offset of a head: (B, h, M, p) -> (B h, factor, M, p)."""
    return x[:, :, None].expand(-1, -1, factor, -1, -1).flatten(0, 1)


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
    length, scale = q.size(2), q.size(3) ** -0.5
    q, keys, values = with_open_block(q, k, v, factor)
    if allowed is None:
        out = attention_by_offset(q, keys, values, factor, scale, dropout_p)
    else:
        block = torch.arange(keys.size(2) - 1, device=q.device)
        earlier = block < (torch.arange(length, device=q.device) // factor)[:, None]
        seen = torch.nn.functional.pad(earlier & allowed[:, : block.size(0)], (1, 0), value=True)
        out = fused_attention(q, keys, values, mask=seen, dropout_p=dropout_p, scale=scale)
    return add_open_block(out, v)


def add_open_block(out: Tensor, v: Tensor) -> Tensor:
    """The outputs of ``with_open_block``'s attention with the value v of the open block, (B, h, N, p_v)."""
    width = v.size(3)
    seen, weight, *_ = out.split([width, 1, *[1] * (out.size(3) - width - 1)], dim=-1)
    return torch.addcmul(seen, weight, v.to(seen.dtype))


def attention_by_offset(
    q: Tensor, keys: Tensor, values: Tensor, factor: int, scale: float, dropout_p: float
) -> Tensor:
    """The attention of ``with_open_block``'s queries, (B, h, N, ..), to its keys and values."""
    out = fused_attention(
        by_offset(q, factor), for_each_offset(keys, factor), for_each_offset(values, factor),
        is_causal=True, dropout_p=dropout_p, scale=scale,
    )  # fmt: skip
    return from_offset(out, q.size(1), q.size(2))


def with_open_block(q: Tensor, k: Tensor, v: Tensor, factor: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries (B, h, N, ..), keys and values (B, h, M, ..) of ``block_causal_attention``, a few wider."""
    dtype, width = accumulation_dtype(q.dtype), v.size(3)
    own = (q.to(dtype) * k).sum(dim=-1, keepdim=True)
    high = own.to(q.dtype)
    # In 16 bits one component is not exact enough for the logit, so two hold it.
    parts = [high] if dtype == q.dtype else [high, (own - high).to(q.dtype)]
    sizes = k.size(3) + len(parts), width + len(parts)

    def make() -> tuple[Tensor, Tensor, Tensor]:
        # The common key is 0, and its value (0, ..., 0, 1).
        first = (torch.arange(sum(sizes), device=q.device) == sizes[0] + width).to(v.dtype)
        ends = torch.arange(-1, 1, dtype=v.dtype, device=q.device)[:, None].expand(-1, len(parts))
        return first, *ends.contiguous()

    first, *ends = kept_constant(("open block", sizes, v.dtype), q, make)
    rows = completed(k, factor, q.size(2)), completed(v, factor, q.size(2))
    both = torch.cat(
        [part for row, end in zip(rows, ends, strict=True) for part in (row, end.expand(*row.shape[:3], -1))],
        dim=-1,
    )
    both = torch.cat([first.to(both.dtype).expand(*both.shape[:2], 1, -1), both], dim=2)
    keys, values = both.split(sizes, dim=-1)
    return torch.cat([q, *parts], dim=-1), keys.to(k.dtype), values.to(v.dtype)


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
