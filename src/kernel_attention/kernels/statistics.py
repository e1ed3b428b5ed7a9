"""Statistics of a padded sequence that no padded position can influence.

Masks are (B, N) bool with True = real token. A real token's *rank* is the number of real tokens before it,
so every function here gives a masked sequence what it would give the same tokens moved together.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit inputs, the input's own precision otherwise."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def exactly(x: Tensor) -> Tensor:
    """x in the precision things accumulate in."""
    return x.to(accumulation_dtype(x.dtype))


def valid_ranks(key_padding_mask: Tensor) -> Tensor:
    """Rank of every position among the real tokens, (B, N) int64; a padded position has its predecessor's."""
    return key_padding_mask.cumsum(dim=1) - 1


def evenly_spaced(num_rows: int, length: int, device: torch.device | None = None) -> Tensor:
    """min(num_rows, length) distinct positions from 0 to length - 1 at even distances, rounded down;
    int64.
    """
    count = min(num_rows, length)
    return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)


def rows_before(position: int, num_rows: int, length: int) -> int:
    """How many of ``evenly_spaced(num_rows, length)`` are smaller than ``position``."""
    count = min(num_rows, length)
    if count == 1:
        return min(position, 1)
    return min(count, -(-position * (count - 1) // (length - 1)))


def num_real(x: Tensor, key_padding_mask: Tensor | None) -> Tensor:
    """Real tokens of every sequence of x (B, N, d): (B,) int64."""
    if key_padding_mask is None:
        return torch.full((x.size(0),), x.size(1), device=x.device)
    return key_padding_mask.sum(dim=1)


def running_mean(
    x: Tensor, key_padding_mask: Tensor | None = None, before: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Mean over the real tokens of every prefix: x (B, h, N, p) -> (B, h, N, p).

    Accumulates in float32 for 16-bit inputs (Primal-Attention supplement, listing 1, lines 39-43).

    Args:
        x: tokens.
        key_padding_mask: (B, N), True = real token.
        before: of real tokens that lie before these, their sum (B, h, 1, p) and their number (B,).
    """
    total = x.to(accumulation_dtype(x.dtype))
    if key_padding_mask is None:
        count = torch.arange(1, x.size(2) + 1, device=x.device, dtype=total.dtype)[:, None]
    else:
        total = total.masked_fill(~key_padding_mask[:, None, :, None], 0.0)
        count = key_padding_mask.cumsum(dim=1).clamp_min(1).to(total.dtype)[:, None, :, None]
    total = total.cumsum(dim=2)
    if before is not None:
        total = total + before[0]
        earlier = before[1].to(total.dtype)[:, None, None, None]
        if key_padding_mask is None:
            count = count + earlier
        else:
            count = (key_padding_mask.cumsum(dim=1)[:, None, :, None] + earlier).clamp_min(1)
    return (total / count).to(x.dtype)


def sample_rows(x: Tensor, num_rows: int, key_padding_mask: Tensor | None = None) -> Tensor:
    """Rows evenly spaced over the real tokens: x (B, N, d) -> (B, min(num_rows, N), d).

    A sequence with fewer than ``num_rows`` real tokens gives all of them, in order, then zero rows.
    """
    if key_padding_mask is None:
        return x if x.size(1) <= num_rows else x[:, evenly_spaced(num_rows, x.size(1), x.device)]
    rank, present = _spaced_ranks(key_padding_mask, num_rows)
    return gather_ranks(x, rank, key_padding_mask) * present[..., None]


def sample_positions(
    x: Tensor, num_rows: int, key_padding_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Where :func:`sample_rows` reads: positions int64, (M,) without a mask or (B, M); which hold a row."""
    if key_padding_mask is None:
        return evenly_spaced(num_rows, x.size(1), x.device), None
    rank, present = _spaced_ranks(key_padding_mask, num_rows)
    return _real_first(key_padding_mask).gather(1, rank), present


def part_positions(
    x: Tensor, num_rows: int, key_padding_mask: Tensor | None, before: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`sample_positions` where x (B, N, d) is one part of every sequence.

    Args:
        x: this part's tokens.
        num_rows: M, of the whole sequence.
        key_padding_mask: (B, N), True = real token; None: all are.
        before: real tokens of the parts before this one, (B,) int64.
        total: real tokens of the whole sequence, (B,) int64.

    Returns:
        positions (B, M) int64 in this part, and which of the rows lie in it, (B, M).
    """
    rank, present = _spaced(total[:, None], num_rows, num_rows)
    rank = rank - before[:, None]
    own = num_real(x, key_padding_mask)[:, None]
    present = present & (rank >= 0) & (rank < own)
    position = rank.where(present, 0)
    if key_padding_mask is not None:
        position = _real_first(key_padding_mask).gather(1, position)
    return position, present


def _spaced_ranks(key_padding_mask: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced ranks (B, M) int64, 0 where a sequence has no more, and where it has one."""
    length = key_padding_mask.sum(dim=1, keepdim=True)
    return _spaced(length, num_rows, min(num_rows, key_padding_mask.size(1)))


def _spaced(length: Tensor, num_rows: int, places: int) -> tuple[Tensor, Tensor]:
    """Of sequences with length (B, 1) real tokens: ranks and presence as above, for the first places."""
    count = length.clamp_max(num_rows)
    row = torch.arange(places, device=length.device)[None]
    rank = row * (length - 1) // (count - 1).clamp_min(1)
    return rank.where(row < count, 0), row < count


def _real_first(key_padding_mask: Tensor) -> Tensor:
    """Positions of the real tokens in their order, then the padded ones, (B, N) int64."""
    return torch.argsort(~key_padding_mask, dim=1, stable=True)


def gather_ranks(x: Tensor, rank: Tensor, key_padding_mask: Tensor) -> Tensor:
    """The real tokens of the given ranks: x (B, N, d), rank (B, M) int64 -> (B, M, d)."""
    order = _real_first(key_padding_mask)
    # Padding may hold anything, NaN included; a rank past the last real token must still read a finite row.
    clean = x.masked_fill(~key_padding_mask[..., None], 0.0)
    return clean.gather(1, order.gather(1, rank)[..., None].expand(-1, -1, x.size(-1)))
