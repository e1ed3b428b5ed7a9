"""Moving the real tokens of a sequence together, and padding a sequence to whole blocks."""

from typing import NamedTuple

import torch
from torch import Tensor

from kernel_attention.tensors.recompute import can_ask


class Compaction(NamedTuple):
    """A permutation of the tokens that puts the real ones first, in their order.

    ``order`` (B, N) int64: the token that moves to position n. ``place`` (B, N): the new position of token n.
    ``attention_mask`` (B, N): the mask after the move, right padding.
    """

    order: Tensor
    place: Tensor
    attention_mask: Tensor

    def apply(self, x: Tensor) -> Tensor:
        """Move the tokens of x, (B, N, d) or (B, h, N, p)."""
        return _take(x, self.order)

    def undo(self, x: Tensor) -> Tensor:
        """Move them back."""
        return _take(x, self.place)

    def undo_matrix(self, matrix: Tensor) -> Tensor:
        """Move the rows and columns of a matrix over the tokens back, (B, h, N, N)."""
        rows = matrix.gather(2, self.place[:, None, :, None].expand_as(matrix))
        return rows.gather(3, self.place[:, None, None, :].expand_as(matrix))


def compaction(attention_mask: Tensor) -> Compaction | None:
    """How to compact sequences with this mask (B, N; True = real token); None where they are compact.

    The mask is examined where that costs nothing. Elsewhere the tokens are always moved, even if to their own
    places.
    """
    if can_ask(attention_mask):
        late = attention_mask[:, 1:] & ~attention_mask[:, :-1]
        if not late.any():
            return None
    order, place = real_first(attention_mask)
    length = attention_mask.sum(dim=1, keepdim=True)
    return Compaction(order, place, torch.arange(place.size(1), device=place.device) < length)


def real_first(attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """``order`` and ``place`` of ``Compaction`` for a mask (B, N), (B, N) int64 each.

    This is a stable sort of booleans. ONNX has no stable sort, and counting is as fast.
    """
    real = attention_mask.cumsum(dim=1)
    padded = (~attention_mask).cumsum(dim=1)
    place = torch.where(attention_mask, real, real[:, -1:] + padded) - 1
    positions = torch.arange(place.size(1), device=place.device).expand_as(place)
    # vmap has no rule for scatter_ in place
    return torch.zeros_like(place).scatter(1, place, positions), place


def pad_tokens(x: Tensor, length: int, value: float = 0.0) -> Tensor:
    """Append rows of ``value`` to x (..., N, d), up to (..., length, d)."""
    missing = length - x.size(-2)
    if not torch.compiler.is_compiling() and missing == 0:
        return x
    if is_exporting():  # repeats one row by index: torch.export cannot prove that ``missing`` is not negative
        rows = torch.arange(length, device=x.device).clamp_max(x.size(-2))
        padded = torch.nn.functional.pad(x, (0, 0, 0, 1), value=value)
        return padded.index_select(x.dim() - 2, rows)
    # torch's own pad makes a separate graph for length 0, which ties compiled code to N modulo the block.
    return torch.cat([x, x.new_full((*x.shape[:-2], missing, x.size(-1)), value)], dim=-2)


def in_blocks(x: Tensor, size: int, value: float = 0.0) -> Tensor:
    """Cut into blocks of ``size`` rows and pad the last: (..., N, d) -> (..., ceil(N / size), size, d)."""
    count = (x.size(-2) + size - 1) // size
    return pad_tokens(x, count * size, value).unflatten(-2, (count, size))


def first_rows(weight: Tensor, count: int, dim: int = 1) -> Tensor:
    """The first ``count`` rows of a weight along ``dim``, by default (h, M, s) -> (h, count, s)."""
    if is_exporting():  # a view keeps the strides of all M rows, and torch.export asks whether count is M
        return weight.index_select(dim, torch.arange(count, device=weight.device))
    if not torch.compiler.is_compiling() and count == weight.size(dim):
        return weight  # the gradient of a view of all rows would be a copy
    return weight.narrow(dim, 0, count)


def is_exporting() -> bool:
    """True where torch.export is tracing; before torch 2.7, whether any tracer is."""
    return getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)()


def zero_padding(x: Tensor, attention_mask: Tensor | None) -> Tensor:
    """x (B, N, d) or (B, h, N, p) with zeros at padded tokens, which may hold any value, also NaN."""
    return x if attention_mask is None else x.masked_fill(~_as_tokens_of(x, attention_mask), 0.0)


def _take(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(-2, _as_tokens_of(x, index).expand_as(x))


def _as_tokens_of(x: Tensor, by_token: Tensor) -> Tensor:
    """(B, N) -> what broadcasts to x, (B, N, d) or (B, h, N, p)."""
    return by_token[..., None] if x.dim() == 3 else by_token[:, None, :, None]
