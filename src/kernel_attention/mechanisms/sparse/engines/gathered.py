"""The sparse patterns over pooled keys that straddle their rows, with O(N (l + N / l)) logits.

Where ``factor`` does not divide the stride, a pooled key can lie in two rows and in two columns of the
pattern, so the keys have no arrangement in rows (see ``blocked``). The queries have one: T rows of l. The
keys that a row of queries sees near it, and those that a column of queries sees elsewhere, are gathered by
their numbers, and one softmax runs over the logits of both.

Legend: B batch, h heads, T rows and l columns of queries, M keys, f factor, p head width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.mechanisms.sparse.engines.joint_softmax import finished, joint_softmax
from kernel_attention.tensors.padding import in_blocks
from kernel_attention.tensors.statistics import accumulation_dtype


class _Parts(NamedTuple):
    """The keys that may be near and far, by number, and the queries that see them.

    near: (T, W), of each row of queries. near_seen: (T, l, W) bool. far: (l, V), of each column of queries;
    (1, V) where all columns have the same. far_seen: (T, l, V) bool. Numbers outside 0..M - 1 are not seen.
    """

    near: Tensor
    near_seen: Tensor
    far: Tensor
    far_seen: Tensor


def gathered_attention(
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
    """Sparse attention (see ``kernel_attention.functional.sparse_attention``) for any stride from f on.

    Args:
        q: (B, h, N, p).
        k: (B, h, M, p), M = ceil(N / f); with ``is_causal`` (B, h, N, p), where row i is the open block
            at token i.
        v: as ``k``.
        stride: l, in positions.
        summary: number of last positions of a row that all queries see (fixed pattern); None: the strided
            pattern.
        factor: f.
        attention_mask: (B, M) right padding.
        is_causal: a query sees the keys before its own, and row i of k.
        dropout_p: probability of dropping an attention weight.
    """
    length = q.size(2)
    q = in_blocks(q * q.size(3) ** -0.5, stride)
    parts = _parts(q.size(2), -(-length // factor), stride, summary, factor, is_causal, q.device)
    near, far = parts.near, parts.far
    near_seen, far_seen = parts.near_seen, parts.far_seen
    own = None
    if is_causal:
        logit = (q * in_blocks(k, stride)).sum(dim=-1, keepdim=True, dtype=accumulation_dtype(q.dtype))
        own = logit.to(q.dtype), in_blocks(v, stride)
        near, far = (index * factor + factor - 1 for index in (near, far))  # a block's last row is the whole
    elif attention_mask is not None:
        near_seen = near_seen & _taken(attention_mask, near, dim=1)[:, None, :, None]
        far_seen = far_seen & _taken(attention_mask, far, dim=1)[:, None, None]

    logits = [q @ _taken(k, near, dim=2).mT, _by_column(q, _taken(k, far, dim=2).mT)]
    weights = joint_softmax(logits, [near_seen, far_seen], own, dropout_p)
    out = weights[0] @ _taken(v, near, dim=2) + _by_column(weights[1], _taken(v, far, dim=2))
    return finished(out, weights, [near_seen, far_seen], own).flatten(2, 3)[:, :, :length]


def _parts(
    num_rows: int,
    num_keys: int,
    stride: int,
    summary: int | None,
    factor: int,
    is_causal: bool,
    device: torch.device,
) -> _Parts:
    """The pattern in two disjoint parts."""
    row = torch.arange(num_rows, device=device)[:, None]
    key_row = torch.arange(-(-num_keys * factor // stride), device=device)  # the last key may end after N
    column = torch.arange(stride, device=device)
    position = row * stride + column  # of a query
    if summary is None:
        # Near are the blocks that reach into |i - j| < l, far those around another position of the column.
        lowest, highest = position - stride + 1, position + stride - 1
        reach = 3 * stride - 2  # positions that a whole row's queries have near them
        far = (key_row * stride + column[:, None]) // factor
        far_seen = torch.ones_like(far, dtype=torch.bool)
    else:
        # Near are the blocks that reach into the query's row, far those that reach into another's summary.
        lowest, highest = position - column, position - column + stride - 1
        reach = stride
        first, last = key_row * stride + stride - summary, key_row * stride + stride - 1
        far = first[:, None] // factor + torch.arange(_touched(summary, factor), device=device)
        # A block with the ends of two rows is counted in the first.
        far_seen = (far <= last[:, None] // factor) & (far > ((last - stride) // factor)[:, None])
        far, far_seen = far.reshape(1, -1), far_seen.reshape(1, -1)
    lowest, highest = (x.div(factor, rounding_mode="floor")[..., None] for x in (lowest, highest))
    near = lowest[:, 0] + torch.arange(_touched(reach, factor), device=device)
    near_seen = (near[:, None] >= lowest) & (near[:, None] <= highest) & (near[:, None] >= 0)
    far_seen = far_seen & ((far < lowest) | (far > highest))
    end = (position // factor)[..., None] if is_causal else num_keys
    return _Parts(near, near_seen & (near[:, None] < end), far, far_seen & (far < end))


def _touched(positions: int, factor: int) -> int:
    """The most blocks that this many positions in a row can lie in."""
    return -(-(positions - 1) // factor) + 1


def _by_column(x: Tensor, matrices: Tensor) -> Tensor:
    """x (B, h, T, l, a) times a matrix for each column, (B, h, l, a, b), or one for all, (B, h, 1, a, b)."""
    if matrices.size(2) == 1:
        return (x.flatten(2, 3) @ matrices[:, :, 0]).unflatten(2, x.shape[2:4])
    return (x.transpose(2, 3) @ matrices).transpose(2, 3)


def _taken(x: Tensor, index: Tensor, dim: int) -> Tensor:
    """Rows by number, (..., M, ...), (a, b) -> (..., a, b, ...); any row where one is out of range."""
    return x.index_select(dim, index.clamp(0, x.size(dim) - 1).flatten()).unflatten(dim, index.shape)
