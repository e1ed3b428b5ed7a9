"""The sparse patterns as a few dense products over blocks, with O(N (l + N / l)) logits.

The sequence of M keys is arranged in T rows of l. A strided pattern is then a key's own row and the rows next
to it, cut to the band |i - j| < l, and the key's column. A fixed pattern is the key's row and the last
columns of the other rows. The two parts are disjoint, and one softmax runs over the logits of both.

Each key serves ``factor`` queries (pooled keys); factor 1 is the pattern itself.

Legend: B batch, h heads, T rows, l columns (the stride in keys), f factor, p head width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernel_attention.mechanisms.sparse.engines.gathered import gathered_attention
from kernel_attention.mechanisms.sparse.engines.joint_softmax import finished, joint_softmax
from kernel_attention.tensors.blocks import completed
from kernel_attention.tensors.padding import pad_tokens
from kernel_attention.tensors.statistics import accumulation_dtype


def blocked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    stride: int,
    summary: int | None,
    factor: int,
    attention_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> Tensor:
    """Sparse attention (see ``kernel_attention.functional.sparse_attention``), blocked.

    Args:
        q: (B, h, N, p).
        k: (B, h, M, p), M = ceil(N / factor); with ``is_causal`` (B, h, N, p), where row i is the open block
            at token i.
        v: as ``k``.
        stride: l times f, in positions.
        summary: number of last positions of a row that all queries see (fixed pattern); None: the strided
            pattern.
        factor: f.
        attention_mask: (B, M) right padding.
        is_causal: a query sees the keys before its own, and row i of k.
        dropout_p: probability of dropping an attention weight.
    """
    if stride % factor:  # pooled keys straddle the rows
        return gathered_attention(
            q, k, v, stride=stride, summary=summary, factor=factor, attention_mask=attention_mask,
            is_causal=is_causal, dropout_p=dropout_p,
        )  # fmt: skip
    length = q.size(2)
    stride = stride // factor
    num_keys = -(-length // factor)
    num_rows = -(-num_keys // stride)
    q = q * q.size(3) ** -0.5
    own = None
    if is_causal:
        logit = (q * k).sum(dim=-1, keepdim=True, dtype=accumulation_dtype(q.dtype)).to(q.dtype)
        own = _queries(logit, num_rows, stride, factor), _queries(v, num_rows, stride, factor)
        k, v = completed(k, factor, length), completed(v, factor, length)
    present = torch.arange(num_rows * stride, device=q.device) < k.size(2)
    if attention_mask is not None and not is_causal:
        present = pad_tokens(attention_mask[..., None], num_rows * stride)[..., 0]
    present = present.view(-1, 1, num_rows, stride)
    q = _queries(q, num_rows, stride, factor)
    k, v = (pad_tokens(x, num_rows * stride).unflatten(2, (num_rows, stride)) for x in (k, v))
    if summary is None:
        out = _strided(q, k, v, present, own, dropout_p)
    else:
        out = _fixed(q, k, v, present, -(-summary // factor), own, dropout_p)
    return out.flatten(2, 4)[:, :, :length]


def _queries(x: Tensor, num_rows: int, stride: int, factor: int) -> Tensor:
    """(B, h, N, p) -> (B, h, T, l, f, p)."""
    return pad_tokens(x, num_rows * stride * factor).unflatten(2, (num_rows, stride, factor))


def _strided(
    q: Tensor, k: Tensor, v: Tensor, present: Tensor, own: tuple[Tensor, Tensor] | None, dropout_p: float
) -> Tensor:
    """The query's row and its neighbours in the band |i - j| < l, and its column."""
    num_rows, stride, factor = q.shape[2:5]
    is_causal = own is not None
    near_keys = _neighbours(k, is_causal)
    # As numbers, because inductor (torch 2.13) writes C++ for a padded bool that does not compile.
    near_present = _neighbours(present[..., None].to(k.dtype), is_causal)[..., 0] > 0
    near = (q.flatten(3, 4) @ near_keys.mT).unflatten(3, (stride, factor))
    by_column, columns = q.transpose(2, 3).flatten(3, 4), k.transpose(2, 3)
    far = (by_column @ columns.mT).unflatten(3, (num_rows, factor)).transpose(2, 3)

    column = torch.arange(stride, device=q.device)[:, None]
    place = torch.arange(near_keys.size(3), device=q.device)  # of a key; the query's own is stride + column
    band = (place > column) & (place < (stride if is_causal else 2 * stride) + column)
    near_allowed = band[:, None] & near_present[:, :, :, None, None]
    far_allowed = (
        _other_rows(num_rows, is_causal, q.device)[:, None, None]
        & present.transpose(2, 3)[:, :, None, :, None]
    )
    weights = joint_softmax([near, far], [near_allowed, far_allowed], own, dropout_p)
    out = (weights[0].flatten(3, 4) @ _neighbours(v, is_causal)).unflatten(3, (stride, factor))
    by_column = weights[1].transpose(2, 3).flatten(3, 4) @ v.transpose(2, 3)
    out = out + by_column.unflatten(3, (num_rows, factor)).transpose(2, 3)
    return finished(out, weights, [near_allowed, far_allowed], own)


def _fixed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    present: Tensor,
    summary: int,
    own: tuple[Tensor, Tensor] | None,
    dropout_p: float,
) -> Tensor:
    """The query's own row, and the last columns of the others."""
    num_rows, stride, factor = q.shape[2:5]
    is_causal = own is not None
    same = (q.flatten(3, 4) @ k.mT).unflatten(3, (stride, factor))
    last_keys, last_values = (x[:, :, :, -summary:].flatten(2, 3) for x in (k, v))
    last = (q.flatten(2, 4) @ last_keys.mT).unflatten(2, (num_rows, stride, factor))

    same_allowed = present[:, :, :, None, None]
    if is_causal:
        column = torch.arange(stride, device=q.device)
        same_allowed = same_allowed & (column < column[:, None])[:, None]
    others = _other_rows(num_rows, is_causal, q.device).repeat_interleave(summary, dim=1)
    last_allowed = others[:, None, None] & present[..., -summary:].flatten(2)[:, :, None, None, None]
    weights = joint_softmax([same, last], [same_allowed, last_allowed], own, dropout_p)
    out = (weights[0].flatten(3, 4) @ v).unflatten(3, (stride, factor))
    out = out + (weights[1].flatten(2, 4) @ last_values).unflatten(2, (num_rows, stride, factor))
    return finished(out, weights, [same_allowed, last_allowed], own)


def _neighbours(x: Tensor, is_causal: bool) -> Tensor:
    """Each row joined with the row before and, unless causal, the row after: (B, h, T, 2 l or 3 l, p)."""
    rows = torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 0 if is_causal else 1))
    if is_causal:
        return torch.cat([rows[:, :, :-1], rows[:, :, 1:]], dim=3)
    return torch.cat([rows[:, :, :-2], rows[:, :, 1:-1], rows[:, :, 2:]], dim=3)


def _other_rows(num_rows: int, is_causal: bool, device: torch.device) -> Tensor:
    """(T, T) bool: the other rows that a query's row sees."""
    row = torch.arange(num_rows, device=device)
    return row < row[:, None] if is_causal else row != row[:, None]
