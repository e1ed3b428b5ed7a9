"""The sparse patterns as a few dense products over blocks, with O(N (l + N / l)) logits.

The sequence of M keys is arranged in T rows of l. A strided pattern is then a key's own row and the rows next
to it, cut to the band |i - j| < l, and the key's column. A fixed pattern is the key's row and the last
columns of the other rows. The two parts are disjoint, and one softmax runs over the logits of both.

Each key serves ``factor`` queries (pooled keys); factor 1 is the pattern itself. Where it does not divide the
stride, a pooled key can lie in two rows and in two columns, so that only the queries have rows. The keys that
a row of queries sees near it, and those that a column of queries sees elsewhere, are then gathered by number.

Legend: B batch, h heads, M keys, T rows, l columns (the stride in keys; in positions if gathered),
f factor, p head width.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.blocks import completed
from kernel_attention.tensors.padding import in_blocks, pad_tokens
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
    """``kernel_attention.functional.sparse_attention`` by blocks.

    k and v are (B, h, M, p), M = ceil(N / f); with ``is_causal`` (B, h, N, p), where row i is the open block
    at token i, and a query sees the keys before its own, and that row. ``stride`` is l f in positions.
    ``summary`` is None for the strided pattern. ``attention_mask`` (B, M) is right padding.
    """
    if stride % factor:  # pooled keys straddle the rows
        return _gathered(q, k, v, stride, summary, factor, attention_mask, is_causal, dropout_p)
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
    weights = _joint_softmax([near, far], [near_allowed, far_allowed], own, dropout_p)
    out = (weights[0].flatten(3, 4) @ _neighbours(v, is_causal)).unflatten(3, (stride, factor))
    by_column = weights[1].transpose(2, 3).flatten(3, 4) @ v.transpose(2, 3)
    out = out + by_column.unflatten(3, (num_rows, factor)).transpose(2, 3)
    return _finished(out, weights, [near_allowed, far_allowed], own)


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
    weights = _joint_softmax([same, last], [same_allowed, last_allowed], own, dropout_p)
    out = (weights[0].flatten(3, 4) @ v).unflatten(3, (stride, factor))
    out = out + (weights[1].flatten(2, 4) @ last_values).unflatten(2, (num_rows, stride, factor))
    return _finished(out, weights, [same_allowed, last_allowed], own)


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


class _Parts(NamedTuple):
    """The keys that may be near and far, by number, and the queries that see them.

    near: (T, W), of each row of queries. near_seen: (T, l, W) bool. far: (l, V), of each column of queries;
    (1, V) where all columns have the same. far_seen: (T, l, V) bool. Numbers outside 0..M - 1 are not seen.
    """

    near: Tensor
    near_seen: Tensor
    far: Tensor
    far_seen: Tensor


def _gathered(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    stride: int,
    summary: int | None,
    factor: int,
    attention_mask: Tensor | None,
    is_causal: bool,
    dropout_p: float,
) -> Tensor:
    """``blocked_attention`` for any stride from f on."""
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
    weights = _joint_softmax(logits, [near_seen, far_seen], own, dropout_p)
    out = weights[0] @ _taken(v, near, dim=2) + _by_column(weights[1], _taken(v, far, dim=2))
    return _finished(out, weights, [near_seen, far_seen], own).flatten(2, 3)[:, :, :length]


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


def _joint_softmax(
    logits: list[Tensor], allowed: list[Tensor], own: tuple[Tensor, Tensor] | None, dropout_p: float
) -> tuple[Tensor, ...]:
    """One softmax over all parts, (..., keys) each, in parts again; the query's own key is last."""
    # Not -inf: rows of padded queries may be empty and must stay finite.
    smallest = torch.finfo(logits[0].dtype).min
    parts = [part.masked_fill(~may, smallest) for part, may in zip(logits, allowed, strict=True)]
    parts += [] if own is None else [own[0]]
    weights = torch.cat(parts, dim=-1).softmax(dim=-1).to(logits[0].dtype)
    weights = torch.nn.functional.dropout(weights, dropout_p)
    return weights.split([part.size(-1) for part in parts], dim=-1)


def _finished(
    out: Tensor, weights: tuple[Tensor, ...], allowed: list[Tensor], own: tuple[Tensor, Tensor] | None
) -> Tensor:
    """The output with the query's own value, (..., p); without one, zeros where no key is seen."""
    if own is not None:
        return out + weights[2] * own[1]
    first, second = (part.any(dim=-1, keepdim=True) for part in allowed)
    return out.masked_fill(~(first | second), 0.0)
