"""The rows f(X) that data-dependent layers sample from a sequence.

They are evenly spaced over the real tokens. The causal form cannot know the length, so its rows lie on a grid
over the longest length.

Legend: B batch, N tokens, d width, h heads, p head width, M rows, s rank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.errors import InputError
from kernel_attention.tensors.constants import kept_constant
from kernel_attention.tensors.padding import is_exporting, real_first, zero_padding
from kernel_attention.tensors.statistics import exactly, num_real


def evenly_spaced(num_rows: int, length: int, device: torch.device | None = None) -> Tensor:
    """min(num_rows, length) distinct positions, evenly spaced from 0 to length - 1, rounded down; int64."""
    count = min(num_rows, length)
    return torch.arange(count, device=device) * (length - 1) // max(count - 1, 1)


def rows_before(position: int, num_rows: int, length: int) -> int:
    """How many of ``evenly_spaced(num_rows, length)`` are smaller than ``position``."""
    count = min(num_rows, length)
    if count == 1:
        return min(position, 1)
    return min(count, -(-position * (count - 1) // (length - 1)))


class Samples(NamedTuple):
    """The positions of the sampled rows.

    ``positions`` is int64, (M,) for all sequences or (B, M). ``present`` (B, M) bool says which of them hold
    a row; None: all.
    """

    positions: Tensor
    present: Tensor | None = None

    def read(self, x: Tensor) -> Tensor:
        """The rows, (B, M, d); zeros where a position holds none."""
        if self.positions.dim() == 1:
            rows = x.index_select(1, self.positions)
        else:
            rows = x.gather(1, self.positions[..., None].expand(-1, -1, x.size(-1)))
        return rows if self.present is None else rows.masked_fill(~self.present[..., None], 0.0)

    def add_to(self, x: Tensor, rows: Tensor) -> None:
        """Add rows (B, M, d) to the tokens of x that they were read from."""
        rows = rows.to(x.dtype)
        if self.present is not None:
            rows = rows.masked_fill(~self.present[..., None], 0.0)
        if self.positions.dim() == 1:
            x.index_add_(1, self.positions, rows)
        else:
            x.scatter_add_(1, self.positions[..., None].expand(-1, -1, x.size(-1)), rows)


def sample_rows(x: Tensor, num_rows: int, attention_mask: Tensor | None = None) -> Tensor:
    """Rows evenly spaced over the real tokens: x (B, N, d) -> (B, min(num_rows, N), d).

    A sequence with fewer than ``num_rows`` real tokens gives all of them, in order, then zero rows.
    """
    if attention_mask is None:
        return x if x.size(1) <= num_rows else x[:, evenly_spaced(num_rows, x.size(1), x.device)]
    rank, present = _spaced_ranks(attention_mask, num_rows)
    return gather_ranks(x, rank, attention_mask) * present[..., None]


def sample_positions(
    x: Tensor, num_rows: int, attention_mask: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The positions that ``sample_rows`` reads, (M,) without a mask, else (B, M), and which hold a row."""
    if attention_mask is None:
        # Made once: a short sequence would feel these operations in every step.
        key, length = ("evenly_spaced", num_rows, x.size(1)), x.size(1)
        return kept_constant(key, x, lambda: evenly_spaced(num_rows, length, x.device)), None
    rank, present = _spaced_ranks(attention_mask, num_rows)
    return real_first(attention_mask)[0].gather(1, rank), present


def part_positions(
    x: Tensor, num_rows: int, attention_mask: Tensor | None, before: Tensor, total: Tensor
) -> tuple[Tensor, Tensor]:
    """``sample_positions`` of M = ``num_rows`` rows where x (B, N, d) is one part of every sequence.

    ``before`` are the real tokens of the parts before this one, ``total`` those of the whole sequence, (B,)
    int64. Returns positions (B, M) int64 in this part, and which of the rows lie in it, (B, M).
    """
    rank, present = _spaced(total[:, None], num_rows, num_rows)
    rank = rank - before[:, None]
    own = num_real(x, attention_mask)[:, None]
    present = present & (rank >= 0) & (rank < own)
    position = rank.where(present, 0)
    if attention_mask is not None:
        position = real_first(attention_mask)[0].gather(1, position)
    return position, present


def gather_ranks(x: Tensor, rank: Tensor, attention_mask: Tensor) -> Tensor:
    """The real tokens of the given ranks: x (B, N, d), rank (B, M) int64 -> (B, M, d)."""
    order = real_first(attention_mask)[0]
    # Padding may hold anything, NaN included; a rank past the last real token must still read a finite row.
    clean = zero_padding(x, attention_mask)
    return clean.gather(1, order.gather(1, rank)[..., None].expand(-1, -1, x.size(-1)))


def sampled_rows(
    x: Tensor, num_rows: int, max_len: int | None, attention_mask: Tensor | None, is_causal: bool
) -> tuple[Tensor, Tensor | None]:
    """The sampled rows of x (B, N, d): (B, M', d), and their ranks (M',) where causal, else None.

    The causal form samples a fixed grid over ``max_len`` and takes the part that x reaches.

    Raises:
        InputError: for a causal call without ``max_len`` or with more than ``max_len`` tokens.
    """
    if not is_causal:
        return sample_rows(x, num_rows, attention_mask), None
    grid = causal_grid(x, num_rows, max_len)
    if attention_mask is None:
        return x[:, grid], grid
    return gather_ranks(x, grid.expand(x.size(0), -1), attention_mask), grid


def causal_grid(x: Tensor, num_rows: int, max_len: int | None) -> Tensor:
    """The ranks (M',) of the rows of the causal grid that x (B, N, d) reaches; raises as ``sampled_rows``."""
    length = x.size(1)
    max_len = required_max_len(max_len, length)
    return evenly_spaced(num_rows, max_len, x.device)[: rows_before(length, num_rows, max_len)]


def causal_samples(x: Tensor, grid: Tensor, attention_mask: Tensor | None) -> Samples:
    """The positions in x (B, N, d) of the tokens of the ranks ``grid``."""
    if attention_mask is None:
        return Samples(grid)
    rank = grid.expand(x.size(0), -1)
    return Samples(real_first(attention_mask)[0].gather(1, rank), rank < num_real(x, attention_mask)[:, None])


def required_max_len(max_len: int | None, length: int) -> int:
    """The length of the causal sampling grid; InputError where it is missing or shorter than the sequence."""
    if max_len is None:
        raise InputError(
            "max_len=None: causal data-dependent attention needs max_len, the length of its sampling grid"
        )
    if length > max_len:
        raise InputError(f"sequence length {length} exceeds max_len={max_len}")
    return max_len


def grid_row(
    position: int | Tensor, num_rows: int, max_len: int | None, dtype: torch.dtype
) -> int | Tensor | None:
    """The number m of the grid's row at ``position``, or None; (B, M) of 0 and 1 for positions (B,)."""
    if isinstance(position, Tensor):
        # An exported program cannot raise the error of a position that it does not know yet, and an
        # accelerator would wait for the answer. A token past the grid is then no row of it.
        is_unknown = is_exporting() or position.numel() == 0 or position.device.type != "cpu"
        length = required_max_len(max_len, 1 if is_unknown else int(position.max()) + 1)
        grid = evenly_spaced(num_rows, length, position.device)
        return (grid == position[:, None]).to(dtype)
    length = required_max_len(max_len, position + 1)
    index = rows_before(position, num_rows, length)
    return index if rows_before(position + 1, num_rows, length) > index else None


def weight_row(weight: Tensor, index: int | Tensor) -> Tensor:
    """Row m of weight (h, M, s), (h, 1, s).

    ``index`` (B, M), 1 at one row and 0 elsewhere, chooses a row for each sequence instead: (B, h, 1, s).
    """
    if isinstance(index, int):
        return weight[:, index, None]
    return torch.einsum("bm,hms->bhs", index.to(weight.dtype), weight)[:, :, None]


def gathered(x: Tensor, lengths: Tensor, w: Tensor, num_rows: int, max_len: int | None) -> Tensor:
    """f(X)^T W, (B, h, p, s), over the rows of the grid of M = ``num_rows`` over ``max_len`` that a prompt
    reaches.

    x is the prompt in the heads' slices, (B, h, N, p), ``lengths`` (B,) its real tokens, and w (h, M, s).
    """
    length = required_max_len(max_len, x.size(2))
    grid = evenly_spaced(num_rows, length, x.device)[: rows_before(x.size(2), num_rows, length)]
    rows = exactly(x[:, :, grid]).masked_fill(grid[:, None] >= lengths[:, None, None, None], 0.0)
    return rows.mT @ exactly(w)[:, : grid.size(0)]


def _spaced_ranks(attention_mask: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Evenly spaced ranks (B, M) int64, 0 past a sequence's last one, and which of them exist."""
    length = attention_mask.sum(dim=1, keepdim=True)
    return _spaced(length, num_rows, min(num_rows, attention_mask.size(1)))


def _spaced(length: Tensor, num_rows: int, places: int) -> tuple[Tensor, Tensor]:
    """The same for sequences with ``length`` (B, 1) real tokens."""
    count = length.clamp_max(num_rows)
    row = torch.arange(places, device=length.device)[None]
    rank = row * (length - 1) // (count - 1).clamp_min(1)
    return rank.where(row < count, 0), row < count
